// The root node of `Inputs`: copies sources to destinations and stores words, as many as fit a
// parameter of so many bytes: the smaller, the faster a replay. kernel.ptx is made from this file, in
// its folder, with CUDA 13.0:
// nvcc -ptx -arch=compute_75 -o kernel.ptx kernel.cu
//
// layout.rs writes the parameter and says what it means.

typedef unsigned long long u64;

template <unsigned BYTES> struct Parameter {
    unsigned copies;
    unsigned stores;
    // The blocks of all copies. The one behind them stores.
    unsigned copy_blocks;
    unsigned unused;
    // First the copies, in the order of their blocks: destination, source, and bytes and first block
    // in one. Then the stores: destination and value.
    u64 words[BYTES / sizeof(u64) - 2];
};

// How many bits of a copy's third word are its first block.
constexpr unsigned BLOCK_BITS = 20;

template <unsigned BYTES>
__device__ __forceinline__ unsigned first_block(const Parameter<BYTES> &p, unsigned copy) {
    return static_cast<unsigned>(p.words[3 * copy + 2]) & ((1u << BLOCK_BITS) - 1);
}

template <typename T>
__device__ __forceinline__ void copy_as(u64 dst, u64 src, u64 bytes, u64 thread, u64 threads) {
    T *__restrict__ to = reinterpret_cast<T *>(dst);
    const T *__restrict__ from = reinterpret_cast<const T *>(src);
    u64 count = bytes / sizeof(T);
#pragma unroll 4
    for (u64 i = thread; i < count; i += threads) {
        to[i] = from[i];
    }
    // What is left is shorter than one element.
    u64 rest = count * sizeof(T) + thread;
    if (rest < bytes) {
        reinterpret_cast<char *>(dst)[rest] = reinterpret_cast<const char *>(src)[rest];
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
    // The last copy whose first block is not behind this one; those without blocks lie before it.
    unsigned low = 0, high = p.copies;
    while (high - low > 1) {
        unsigned middle = (low + high) / 2;
        if (first_block(p, middle) <= blockIdx.x) {
            low = middle;
        } else {
            high = middle;
        }
    }
    u64 dst = p.words[3 * low], src = p.words[3 * low + 1], bytes = p.words[3 * low + 2] >> BLOCK_BITS;
    if (dst == src) {
        return;
    }
    // Copies without blocks behind this one begin where it ends.
    unsigned first = first_block(p, low);
    unsigned end = low + 1 < p.copies ? first_block(p, low + 1) : p.copy_blocks;
    u64 thread = static_cast<u64>(blockIdx.x - first) * blockDim.x + threadIdx.x;
    u64 threads = static_cast<u64>(end - first) * blockDim.x;
    u64 alignment = dst | src;
    if (alignment % 16 == 0) {
        copy_as<uint4>(dst, src, bytes, thread, threads);
    } else if (alignment % 4 == 0) {
        copy_as<unsigned>(dst, src, bytes, thread, threads);
    } else {
        copy_as<unsigned char>(dst, src, bytes, thread, threads);
    }
}

#define ENTRY(BYTES)                                                                               \
    static_assert(sizeof(Parameter<BYTES>) == BYTES, "no gaps");                                   \
    extern "C" __global__ void cg_inputs_##BYTES(__grid_constant__ const Parameter<BYTES> p) {     \
        run(p);                                                                                    \
    }

ENTRY(128)
ENTRY(256)
ENTRY(512)
ENTRY(1024)
ENTRY(1600)
ENTRY(2560)
ENTRY(4096) // the most that every chip takes
