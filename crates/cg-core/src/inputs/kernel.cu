// The root node of `Inputs`: copies sources to destinations and stores words, as many as fit a
// parameter of so many bytes: the smaller, the faster a replay. kernel.ptx is made from this file by
// `make ptx`.
//
// layout.rs writes the parameter, and places.rs says what is where.

typedef unsigned long long u64;

// What is written to the rows of a destination that its source does not have.
enum Fill : unsigned char { NOTHING, ZEROS, LAST_ROW };

template <unsigned BYTES> struct Parameter {
    unsigned char copies;
    unsigned char stores;
    Fill fill;
    unsigned char unused;
    // The blocks of all copies. The one behind them stores.
    unsigned copy_blocks;
    // How many rows a source has, of as many as a destination has, where copies have rows.
    unsigned rows;
    unsigned of;
    // First the copies, in the order of their blocks: destination, source and extent of each, or where
    // the sources stand together, the lower halves of all, their upper halves, and then destination
    // and extent of each. Then the stores: destination and value.
    u64 words[BYTES / sizeof(u64) - 2];

    static constexpr bool SOURCES_TOGETHER = BYTES <= 256;

    __device__ __forceinline__ u64 source(unsigned copy) const {
        if (!SOURCES_TOGETHER) {
            return words[3 * copy + 1];
        }
        return static_cast<u64>(half(copies + copy)) << 32 | half(copy);
    }

    __device__ __forceinline__ u64 destination(unsigned copy) const {
        return words[SOURCES_TOGETHER ? copies + 2 * copy : 3 * copy];
    }

    // Bytes, first block and whether it has rows in one.
    __device__ __forceinline__ u64 extent(unsigned copy) const {
        return words[SOURCES_TOGETHER ? copies + 2 * copy + 1 : 3 * copy + 2];
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
    u64 dst = p.destination(low), src = p.source(low), extent = p.extent(low);
    bool has_rows = p.fill != NOTHING && (extent & HAS_ROWS);
    if (dst == src && !has_rows) {
        return;
    }
    // Copies without blocks behind this one begin where it ends.
    unsigned first = first_block(p, low);
    unsigned end = low + 1 < p.copies ? first_block(p, low + 1) : p.copy_blocks;
    u64 thread = static_cast<u64>(blockIdx.x - first) * blockDim.x + threadIdx.x;
    u64 threads = static_cast<u64>(end - first) * blockDim.x;
    u64 bytes = (extent & ~HAS_ROWS) >> BLOCK_BITS;
    u64 row = has_rows ? bytes / p.of : 0;
    u64 head = has_rows ? row * p.rows : bytes;
    if (dst != src) {
        copy(dst, src, head, thread, threads);
    }
    if (head < bytes) {
        u64 last = p.fill == LAST_ROW ? src + head - row : 0;
        pad(dst + head, last, row, bytes - head, thread, threads);
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
