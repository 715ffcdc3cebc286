// What the nodes of `Inputs` and of `Outputs` have in common: a parameter of copies, as many as fit
// so many bytes: the smaller, the faster a replay.
//
// layout.rs writes the parameter, and places.rs says what is where.
#pragma once

typedef unsigned long long u64;

// What is written to the rows of the own side that the other one does not have.
enum Fill : unsigned char { NOTHING, ZEROS, LAST_ROW };

template <unsigned BYTES> struct Parameter {
    unsigned char copies;
    unsigned char stores;
    Fill fill;
    unsigned char unused;
    // The blocks of all copies. The one behind them stores.
    unsigned copy_blocks;
    // How many rows the other side has, of as many as the own side has, where copies have rows.
    unsigned rows;
    unsigned of;
    // First the copies, in the order of their blocks: the graph's own side, the other side and the extent
    // of each, or where the other sides stand together, the lower halves of all, their upper halves, and
    // then own side and extent of each. Then the stores: destination and value.
    u64 words[BYTES / sizeof(u64) - 2];

    static constexpr bool OTHERS_TOGETHER = BYTES <= 256;

    __device__ __forceinline__ u64 other(unsigned copy) const {
        if (!OTHERS_TOGETHER) {
            return words[3 * copy + 1];
        }
        return static_cast<u64>(half(copies + copy)) << 32 | half(copy);
    }

    __device__ __forceinline__ u64 own(unsigned copy) const {
        return words[OTHERS_TOGETHER ? copies + 2 * copy : 3 * copy];
    }

    // Bytes, first block and whether it has rows in one.
    __device__ __forceinline__ u64 extent(unsigned copy) const {
        return words[OTHERS_TOGETHER ? copies + 2 * copy + 1 : 3 * copy + 2];
    }

    __device__ __forceinline__ unsigned half(unsigned i) const {
        return static_cast<unsigned>(words[i / 2] >> (i % 2 * 32));
    }
};

// How many bits of an extent are the first block.
constexpr unsigned BLOCK_BITS = 20;
// Whether the copy has rows, in the same word.
constexpr u64 HAS_ROWS = 1ull << 63;

template <unsigned BYTES>
__device__ __forceinline__ unsigned first_block(const Parameter<BYTES> &p, unsigned copy) {
    return static_cast<unsigned>(p.extent(copy)) & ((1u << BLOCK_BITS) - 1);
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

// The copy of a whole destination, or of the first rows.
__device__ __forceinline__ void copy(u64 dst, u64 src, u64 bytes, u64 thread, u64 threads) {
    u64 alignment = dst | src;
    if (alignment % 16 == 0) {
        copy_as<uint4>(dst, src, bytes, thread, threads);
    } else if (alignment % 4 == 0) {
        copy_as<unsigned>(dst, src, bytes, thread, threads);
    } else {
        copy_as<unsigned char>(dst, src, bytes, thread, threads);
    }
}

// The copy that this block works on.
template <unsigned BYTES>
__device__ __forceinline__ unsigned copy_of_block(const Parameter<BYTES> &p) {
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
    return low;
}

// This thread among those of a copy.
struct Share {
    u64 thread, threads;
};

template <unsigned BYTES>
__device__ __forceinline__ Share share_of(const Parameter<BYTES> &p, unsigned copy) {
    // Copies without blocks behind this one begin where it ends.
    unsigned first = first_block(p, copy);
    unsigned end = copy + 1 < p.copies ? first_block(p, copy + 1) : p.copy_blocks;
    return {static_cast<u64>(blockIdx.x - first) * blockDim.x + threadIdx.x,
            static_cast<u64>(end - first) * blockDim.x};
}

// A kernel for each size of the parameter.
#define ENTRY(NAME, BYTES)                                                                         \
    static_assert(sizeof(Parameter<BYTES>) == BYTES, "no gaps");                                   \
    extern "C" __global__ void NAME##_##BYTES(__grid_constant__ const Parameter<BYTES> p) {        \
        run(p);                                                                                    \
    }
#define ENTRIES(NAME)                                                                              \
    ENTRY(NAME, 128)                                                                               \
    ENTRY(NAME, 256)                                                                               \
    ENTRY(NAME, 512)                                                                               \
    ENTRY(NAME, 1024)                                                                              \
    ENTRY(NAME, 1600)                                                                              \
    ENTRY(NAME, 2560)                                                                              \
    ENTRY(NAME, 4096) // the most that every chip takes
