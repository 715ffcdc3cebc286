// The last node of a graph with `Outputs`: copies its own memory to where a replay says. outputs.ptx
// is made from this file by `make ptx`.

#include "copies.cuh"

template <unsigned BYTES> __device__ __forceinline__ void run(const Parameter<BYTES> &p) {
    if (blockIdx.x >= p.copy_blocks) {
        return;
    }
    unsigned one = copy_of_block(p);
    u64 dst = p.other(one), src = p.own(one);
    if (dst != src) {
        Share share = share_of(p, one);
        copy(dst, src, p.extent(one) >> BLOCK_BITS, share.thread, share.threads);
    }
}

ENTRIES(cg_outputs)
