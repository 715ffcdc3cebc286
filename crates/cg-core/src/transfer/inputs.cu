// The root node of `Inputs`: copies sources to destinations and stores words. inputs.ptx is made from
// this file by `make ptx`.

#include "copies.cuh"

// Writes this row again and again, or zeros if there is none.
template <typename T>
__device__ __forceinline__ void pad_as(u64 dst, u64 row, u64 row_bytes, u64 bytes, u64 thread,
                                       u64 threads) {
    T *to = reinterpret_cast<T *>(dst);
    const T *from = reinterpret_cast<const T *>(row);
    u64 count = bytes / sizeof(T);
    u64 period = row_bytes / sizeof(T);
    for (u64 i = thread; i < count; i += threads) {
        to[i] = from ? from[i % period] : T{};
    }
    // What is left is shorter than one element. Rows are whole elements.
    u64 rest = count * sizeof(T) + thread;
    if (rest < bytes) {
        reinterpret_cast<char *>(dst)[rest] = 0;
    }
}

__device__ __forceinline__ void pad(u64 dst, u64 row, u64 row_bytes, u64 bytes, u64 thread,
                                    u64 threads) {
    u64 alignment = dst | (row ? row | row_bytes : 0);
    if (alignment % 16 == 0) {
        pad_as<uint4>(dst, row, row_bytes, bytes, thread, threads);
    } else if (alignment % 4 == 0) {
        pad_as<unsigned>(dst, row, row_bytes, bytes, thread, threads);
    } else {
        pad_as<unsigned char>(dst, row, row_bytes, bytes, thread, threads);
    }
}

template <unsigned BYTES> __device__ __forceinline__ void run(const Parameter<BYTES> &p) {
    if (blockIdx.x >= p.copy_blocks) {
        for (unsigned i = threadIdx.x; i < p.stores; i += blockDim.x) {
            const u64 *store = p.words + 3 * p.copies + 2 * i;
            *reinterpret_cast<u64 *>(store[0]) = store[1];
        }
        return;
    }
    unsigned one = copy_of_block(p);
    u64 dst = p.own(one), src = p.other(one), extent = p.extent(one);
    bool has_rows = p.fill != NOTHING && (extent & HAS_ROWS);
    if (dst == src && !has_rows) {
        return;
    }
    Share share = share_of(p, one);
    u64 bytes = (extent & ~HAS_ROWS) >> BLOCK_BITS;
    u64 row = has_rows ? bytes / p.of : 0;
    u64 head = has_rows ? row * p.rows : bytes;
    if (dst != src) {
        copy(dst, src, head, share.thread, share.threads);
    }
    if (head < bytes) {
        u64 last = p.fill == LAST_ROW ? src + head - row : 0;
        pad(dst + head, last, row, bytes - head, share.thread, share.threads);
    }
}

ENTRIES(cg_inputs)
