// The end of a step of a loop: publishes what the step has made, moves random states on, and decides whether there
// is another step. step_end.ptx is made from this file by `make ptx`; parameter.rs writes the parameter.

typedef unsigned long long u64;

constexpr unsigned MOST_PIECES = 8;
constexpr unsigned MOST_OFFSETS = 4;

// In the memory of the device.
struct State {
    unsigned step;
    unsigned is_over;
};

// In pinned memory of the host.
struct Host {
    unsigned steps;
    unsigned stop;
};

struct Piece {
    u64 address;
    u64 bytes;
};

struct Offset {
    u64 address;
    u64 increment;
};

struct Parameter {
    cudaGraphConditionalHandle condition;
    State *state;
    volatile Host *host;
    // Pieces one after the other, for each step.
    unsigned char *ring;
    u64 bytes_of_step;
    // The loop ends where all elements are other than zero.
    const unsigned char *until;
    unsigned elements;
    // Zero without such a tensor.
    unsigned element_bytes;
    unsigned most_steps;
    // False at the end of all steps of an iteration but the last.
    unsigned decides;
    unsigned pieces;
    unsigned offsets;
    Piece piece[MOST_PIECES];
    Offset offset[MOST_OFFSETS];
};

static __device__ bool is_set(const Parameter &p, unsigned element) {
    const unsigned char *at = p.until + static_cast<u64>(element) * p.element_bytes;
    bool found = false;
    for (unsigned i = 0; i < p.element_bytes; i++) {
        found |= at[i] != 0;
    }
    return found;
}

static __device__ void publish(const Parameter &p, unsigned step) {
    unsigned char *to = p.ring + step * p.bytes_of_step;
    for (unsigned one = 0; one < p.pieces; one++) {
        u64 from = p.piece[one].address, bytes = p.piece[one].bytes;
        bool by_words = ((from | reinterpret_cast<u64>(to) | bytes) & 3) == 0;
        unsigned size = by_words ? 4 : 1;
        for (u64 i = threadIdx.x; i < bytes / size; i += blockDim.x) {
            if (by_words) {
                reinterpret_cast<unsigned *>(to)[i] = reinterpret_cast<const unsigned *>(from)[i];
            } else {
                to[i] = reinterpret_cast<const unsigned char *>(from)[i];
            }
        }
        to += bytes;
    }
}

extern "C" __global__ void cg_step_end(const Parameter p) {
    __shared__ unsigned step, was_over;
    if (threadIdx.x == 0) {
        step = p.state->step;
        was_over = p.state->is_over;
    }
    __syncthreads();
    if (!was_over) {
        publish(p, step);
        int all = p.element_bytes != 0;
        for (unsigned i = threadIdx.x; i < p.elements && all; i += blockDim.x) {
            all = is_set(p, i);
        }
        all = __syncthreads_and(all);
        // What each thread has written is there before the host sees the number of the step.
        __threadfence_system();
        __syncthreads();
        if (threadIdx.x == 0) {
            for (unsigned i = 0; i < p.offsets; i++) {
                *reinterpret_cast<u64 *>(p.offset[i].address) += p.offset[i].increment;
            }
            p.state->step = step + 1;
            p.state->is_over = all || step + 1 >= p.most_steps || p.host->stop != 0;
            p.host->steps = step + 1;
        }
    }
    if (threadIdx.x == 0 && p.decides) {
        cudaGraphSetConditional(p.condition, !p.state->is_over);
    }
}
