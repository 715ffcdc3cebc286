// The kernels of the tests. kernels.ptx is made from this file by `make ptx`.

extern "C" __global__ void axpy(unsigned a, const unsigned *x, unsigned *y, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        y[i] = a * x[i] + y[i];
    }
}

extern "C" __global__ void fill(unsigned *x, unsigned value, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        x[i] = value;
    }
}

__device__ unsigned long long now() {
    unsigned long long nanoseconds;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
    return nanoseconds;
}

extern "C" __global__ void slow_fill(unsigned *x, unsigned value, unsigned n,
                                     unsigned long long nanoseconds) {
    unsigned long long start = now();
    while (now() - start < nanoseconds) {
    }
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        x[i] = value;
    }
}

// One less to do; a condition stays true as long as there is something left.
extern "C" __global__ void count_down(unsigned *left, cudaGraphConditionalHandle condition) {
    if (threadIdx.x == 0) {
        *left -= 1;
        cudaGraphSetConditional(condition, *left != 0);
    }
}

// A condition is true if a number is odd.
extern "C" __global__ void if_odd(const unsigned *number, cudaGraphConditionalHandle condition) {
    if (threadIdx.x == 0) {
        cudaGraphSetConditional(condition, *number & 1);
    }
}
