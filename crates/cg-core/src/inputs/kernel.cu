// The root node of `Inputs`: copies sources to destinations and stores words, as many as fit a
// parameter of 512, 1024 or 4096 bytes: the smaller, the faster a replay. kernel.ptx is made from this
// file, in its folder, with CUDA 13.0:
// nvcc -ptx -arch=compute_75 -o kernel.ptx kernel.cu
//
// layout.rs writes the parameter and says what it means.

typedef unsigned long long u64;

// A copy is two cells: destination and source, then bytes and blocks (the first block in the low
// half, their number in the high half). A store is one cell: destination and value.
struct Cell {
    u64 first, second;
};

template <unsigned BYTES> struct Parameter {
    unsigned copies;
    unsigned stores;
    // The blocks of all copies. The one behind them stores.
    unsigned copy_blocks;
    unsigned unused;
    // First the copies, in the order of their blocks, then the stores.
    Cell cells[BYTES / sizeof(Cell) - 1];
};

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
            const Cell &store = p.cells[2 * p.copies + i];
            *reinterpret_cast<u64 *>(store.first) = store.second;
        }
        return;
    }
    // The last copy whose first block is not behind this one; those without blocks lie before it.
    unsigned low = 0, high = p.copies;
    while (high - low > 1) {
        unsigned middle = (low + high) / 2;
        if (static_cast<unsigned>(p.cells[2 * middle + 1].second) <= blockIdx.x) {
            low = middle;
        } else {
            high = middle;
        }
    }
    u64 dst = p.cells[2 * low].first, src = p.cells[2 * low].second;
    if (dst == src) {
        return;
    }
    u64 bytes = p.cells[2 * low + 1].first, blocks = p.cells[2 * low + 1].second;
    u64 block = blockIdx.x - static_cast<unsigned>(blocks);
    u64 thread = block * blockDim.x + threadIdx.x;
    u64 threads = (blocks >> 32) * blockDim.x;
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
    static_assert(sizeof(Parameter<BYTES>) == BYTES, "the header is one cell");                    \
    extern "C" __global__ void cg_inputs_##BYTES(__grid_constant__ const Parameter<BYTES> p) {     \
        run(p);                                                                                    \
    }

ENTRY(512)
ENTRY(1024)
ENTRY(4096) // the most that every chip takes
