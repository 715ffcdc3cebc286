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
