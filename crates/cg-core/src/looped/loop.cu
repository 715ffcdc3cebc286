// The kernels around the steps of a loop. loop.ptx is made from this file by `make ptx`; parameters.rs writes their
// parameters.

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
    // The random states' after the last step.
    u64 offset[MOST_OFFSETS];
};

// True where all elements are other than zero.
struct Flags {
    const unsigned char *first;
    unsigned elements;
    // Zero without flags.
    unsigned element_bytes;
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
    // End the loop.
    Flags until;
    unsigned most_steps;
    // False at the end of all steps of an iteration but the last.
    unsigned decides;
    unsigned pieces;
    unsigned offsets;
    Piece piece[MOST_PIECES];
    Offset offset[MOST_OFFSETS];
};

static __device__ bool is_set(const Flags &flags, unsigned element) {
    const unsigned char *at = flags.first + static_cast<u64>(element) * flags.element_bytes;
    bool found = false;
    for (unsigned i = 0; i < flags.element_bytes; i++) {
        found |= at[i] != 0;
    }
    return found;
}

// For all threads of the block.
static __device__ bool are_set(const Flags &flags) {
    int all = flags.element_bytes != 0;
    for (unsigned i = threadIdx.x; i < flags.elements && all; i += blockDim.x) {
        all = is_set(flags, i);
    }
    return __syncthreads_and(all);
}

static __device__ void move(const Offset &offset) {
    *reinterpret_cast<u64 *>(offset.address) += offset.increment;
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

// Publish what a step has made, move random states on, and decide whether there is another step.
extern "C" __global__ void cg_step_end(const Parameter p) {
    // Asked first, as the answer of the host takes longest.
    unsigned stop = p.decides && threadIdx.x == 0 ? p.host->stop : 0;
    unsigned step = p.state->step;
    bool is_over = p.state->is_over != 0;
    if (!is_over) {
        publish(p, step);
        // All threads of the block have published, and have read the state.
        bool all = are_set(p.until);
        if (threadIdx.x == 0) {
            for (unsigned i = 0; i < p.offsets; i++) {
                move(p.offset[i]);
                p.host->offset[i] = *reinterpret_cast<const u64 *>(p.offset[i].address);
            }
            // A word of the host ends whole iterations, so that the state is that of the last step.
            is_over = all || step + 1 >= p.most_steps || stop != 0;
            p.state->step = step + 1;
            p.state->is_over = is_over;
            // What the block has written is there before the host sees the number of the step.
            __threadfence_system();
            p.host->steps = step + 1;
        }
    }
    if (threadIdx.x == 0 && p.decides) {
        cudaGraphSetConditional(p.condition, !is_over);
    }
}

struct Stage {
    const State *state;
    unsigned offsets;
    Offset offset[MOST_OFFSETS];
};

// Move on what a stage of a step has drawn from, so that the next stage draws what comes behind.
extern "C" __global__ void cg_stage_end(const Stage p) {
    if (threadIdx.x == 0 && !p.state->is_over) {
        for (unsigned i = 0; i < p.offsets; i++) {
            move(p.offset[i]);
        }
    }
}

// Let a stage of a step run if all flags are set.
extern "C" __global__ void cg_decide(cudaGraphConditionalHandle condition, const Flags flags) {
    bool all = are_set(flags);
    if (threadIdx.x == 0) {
        cudaGraphSetConditional(condition, all);
    }
}
