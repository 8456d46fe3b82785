"""A product on Hopper's tensor cores whose tiles meet others before they are stored, in CUDA C++.

Two groups of 128 threads hold 64 rows of the left matrix each, most of them in registers, for good; the right matrix
passes by through a ring in shared memory, 64 columns after another, and stays in the L2 cache. The groups take turns:
while one multiplies, the other adds to and scales what it has multiplied before. Three more threads do nothing but
tensor copies: of the right matrix, and of each group's tiles in and out. Triton's kernels for the same (128 x 128
tiles, two programs a multiprocessor) read both matrices for every tile, half as much again from the L2 cache, which is
what bounds them.

Macros: MODE (see `product.multiply`), DEPTHS: steps of 64 of the sum, PASSES: layers of LAST, else 1, STAGES: of the
ring, KEEPS: 1 if FORWARD stores y, else 0, BFLOAT16: defined for that type.
"""

SOURCE = r"""
typedef unsigned int u32;
typedef unsigned long long u64;
struct __align__(64) TensorMap { char bytes[128]; };

#define FORWARD 0
#define BACKWARD 1
#define LAST 2
#define ACROSS (MODE != FORWARD)
#ifdef BFLOAT16
#define KIND "bf16"
#define EXPONENT 0x7F80u
#else
#define KIND "f16"
#define EXPONENT 0x7C00u
#endif
#define ROWS 128
#define COLUMNS 64
#define STEP 64
#define TILE_BYTES (64 * COLUMNS * 2)
#define BLOCK_BYTES (STEP * COLUMNS * 2)
#define HELD (DEPTHS < 6 ? DEPTHS : 6)  // steps of the left matrix in registers; more would not fit
#define GROUP 128
#define SUMS_BYTES (2 * 4 * COLUMNS * 4)

__device__ __forceinline__ u32 place(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// Barriers of shared memory: phases alternate between parity 0 and 1.
__device__ __forceinline__ void make_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_for(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred ready;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ready, [%0], %1;\n"
        "@!ready bra again;\n"
        "}\n" :: "r"(barrier), "r"(parity) : "memory");
}

// Tensor copies of tiles to shared memory and back.
__device__ __forceinline__ void load_tile(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
        :: "r"(to), "l"(&map), "r"(barrier), "r"(column), "r"(row) : "memory");
}
__device__ __forceinline__ void store_tile(const TensorMap& map, int column, int row, u32 from) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
        :: "l"(&map), "r"(from), "r"(column), "r"(row) : "memory");
}

// One 16-deep step of a product of 64 rows and 64 columns, d += a b, by the 128 threads of a group: a in registers,
// or in shared memory.
__device__ __forceinline__ u64 describe(u32 address) {
    // 128-byte swizzle; groups of eight 128-byte rows lie 1024 bytes apart, whichever way the matrix lies.
    return (u64)((address & 0x3FFFF) >> 4) | ((u64)(1024 >> 4) << 16) | ((u64)(1024 >> 4) << 32) | (1ull << 62);
}
#define SUMS \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OF_SUMS(d) \
    FOUR(d, 0), FOUR(d, 4), FOUR(d, 8), FOUR(d, 12), FOUR(d, 16), FOUR(d, 20), FOUR(d, 24), FOUR(d, 28)
#define PRODUCT "wgmma.mma_async.sync.aligned.m64n64k16.f32." KIND "." KIND " " SUMS
__device__ __forceinline__ void multiply(float (&d)[32], const u32 (&a)[4], u64 b, int adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %37, 0;\n" PRODUCT "{%32, %33, %34, %35}, %36, adds, 1, 1, %38;\n}\n"
        : OF_SUMS(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds), "n"(ACROSS));
}
__device__ __forceinline__ void multiply(float (&d)[32], u64 a, u64 b, int adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %34, 0;\n" PRODUCT "%32, %33, adds, 1, 1, 0, %35;\n}\n"
        : OF_SUMS(d) : "l"(a), "l"(b), "r"(adds), "n"(ACROSS));
}
__device__ __forceinline__ void hold(float (&d)[32]) {  // what a product still in progress writes is not read before
    #pragma unroll
    for (int i = 0; i < 32; i++) asm volatile("" : "+f"(d[i]) :: "memory");
}
template <int LEFT> __device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(LEFT) : "memory");
}

// Two neighbouring numbers of 16 bits.
__device__ __forceinline__ u32 read_pair(u32 address) {
    u32 pair;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(pair) : "r"(address) : "memory");
    return pair;
}
__device__ __forceinline__ u32 write_pair(u32 address, float low, float high) {
    u32 pair;
    asm("cvt.rn." KIND "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    asm volatile("st.shared.b32 [%0], %1;" :: "r"(address), "r"(pair) : "memory");
    return pair;
}
__device__ __forceinline__ bool is_bad(u32 pair) {  // NaN or infinite: all bits of an exponent are set
    return (pair & EXPONENT) == EXPONENT || (pair >> 16 & EXPONENT) == EXPONENT;
}
__device__ __forceinline__ float widen(unsigned short number) {
#ifdef BFLOAT16
    return __uint_as_float((u32)number << 16);
#else
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(number));
    return wide;
#endif
}
__device__ __forceinline__ float low(u32 pair) { return widen((unsigned short)pair); }
__device__ __forceinline__ float high(u32 pair) { return widen((unsigned short)(pair >> 16)); }

// Two neighbouring numbers of global memory; zeros outside.
__device__ __forceinline__ u32 fetch_pair(const unsigned short* from, bool here) {
    return here ? __ldg((const u32*)from) : 0;
}

extern "C" __global__ void __launch_bounds__(3 * GROUP, 1) tile_product_kernel(
    const __grid_constant__ TensorMap left, const __grid_constant__ TensorMap right,
    const __grid_constant__ TensorMap one, const __grid_constant__ TensorMap other,
    const __grid_constant__ TensorMap more, const __grid_constant__ TensorMap out,
    const unsigned short* left_at, const unsigned short* bias, float* partial, u64* status,
    int size, int width, int depth, int across, int share) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 sets = place(shared), rest = sets + 8 * TILE_BYTES, ring = rest + 2 * (DEPTHS - HELD) * TILE_BYTES;
    const u32 sums = ring + STAGES * BLOCK_BYTES, barriers = sums + SUMS_BYTES;
    const u32 full = barriers, empty = full + 8 * STAGES, loaded = empty + 8 * STAGES, done = loaded + 32;
    const u32 turns = done + 32, rest_full = turns + 16;
    const int parts = (across + share - 1) / share;
    const int band = blockIdx.x / parts, first_tile = blockIdx.x % parts * share;
    const int tiles = min(share, across - first_tile);
    const int role = threadIdx.x / GROUP, thread = threadIdx.x % GROUP, warp = thread / 32, lane = thread % 32;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) { make_barrier(full + 8 * i, 1); make_barrier(empty + 8 * i, 8); }
        for (int i = 0; i < 4; i++) { make_barrier(loaded + 8 * i, 1); make_barrier(done + 8 * i, GROUP); }
        for (int i = 0; i < 2; i++) make_barrier(turns + 8 * i, 1);
        make_barrier(rest_full, 1);
        asm volatile("fence.proxy.async;" ::: "memory");  // tensor copies see the barriers, too
    }
    __syncthreads();

    if (role == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (lane == 0 && warp == 0) {  // brings what is multiplied
            if (DEPTHS > HELD) expect_bytes(rest_full, 2 * (DEPTHS - HELD) * TILE_BYTES);
            for (int k = HELD; k < DEPTHS; k++)
                load_tile(rest + 2 * (k - HELD) * TILE_BYTES, left, k * STEP, band * ROWS, rest_full);
            int block = 0;
            for (int tile = 0; tile < tiles; tile++) {
                const int at = (first_tile + tile) * COLUMNS;
                for (int k = 0; k < DEPTHS; k++, block++) {
                    const u32 stage = block % STAGES, to = ring + stage * BLOCK_BYTES;
                    wait_for(empty + 8 * stage, (block / STAGES & 1) ^ 1);
                    expect_bytes(full + 8 * stage, BLOCK_BYTES);
                    if (ACROSS) load_tile(to, right, at, k * STEP, full + 8 * stage);
                    else load_tile(to, right, k * STEP, at, full + 8 * stage);
                }
            }
        } else if (lane == 0 && warp <= 2) {  // brings the tiles that a product meets, and takes the results away
            const int set = warp - 1, passes = tiles * PASSES, row = band * ROWS + set * 64;
            for (int i = 0; i < passes + 2; i++) {
                const u32 to = sets + (2 * set + i % 2) * 2 * TILE_BYTES, barrier = 8 * (2 * set + i % 2);
                if (i >= 2) {
                    const int column = (first_tile + (i - 2) / PASSES) * COLUMNS;
                    wait_for(done + barrier, i / 2 - 1 & 1);
                    if ((i - 2) % PASSES == PASSES - 1) {
                        store_tile(out, column, row, to);
                        if (MODE == BACKWARD || MODE == FORWARD && KEEPS)
                            store_tile(more, column, row, to + TILE_BYTES);
                        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
                        if (i < passes) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
                    }
                }
                if (i < passes) {
                    const int layer = i % PASSES, column = (first_tile + i / PASSES) * COLUMNS;
                    expect_bytes(loaded + barrier, 2 * TILE_BYTES);
                    if (MODE != LAST || layer == PASSES - 1) load_tile(to, one, column, row, loaded + barrier);
                    else load_tile(to, other, column, layer * size + row, loaded + barrier);
                    if (MODE == LAST) load_tile(to + TILE_BYTES, more, column, layer * size + row, loaded + barrier);
                    else load_tile(to + TILE_BYTES, other, column, row, loaded + barrier);
                }
            }
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        // Of 64 rows a thread holds two, of each group of eight columns two neighbours; see the PTX manual.
        const int row = band * ROWS + role * 64 + warp * 16 + lane / 4, turn = lane / 4;
        const u32 own = (warp * 16 + lane / 4) * 128 + lane % 4 * 4;
        u32 a[HELD * 4][4];
        #pragma unroll
        for (int k = 0; k < HELD * 4; k++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const int r = row + i % 2 * 8, c = k * 16 + i / 2 * 8 + lane % 4 * 2;
                a[k][i] = fetch_pair(left_at + (u64)r * depth + c, r < size && c < depth);
            }
        }
        if (DEPTHS > HELD) wait_for(rest_full, 0);
        int pass = 0;
        bool bad = false;
        for (int tile = 0; tile < tiles; tile++) {
            float d[32];
#if MODE != LAST
            const int column = (first_tile + tile) * COLUMNS;
#endif
#if MODE == FORWARD
            u32 biases[8];
            #pragma unroll
            for (int i = 0; i < 8; i++) {
                const int c = column + i * 8 + lane % 4 * 2;
                biases[i] = fetch_pair(bias + c, c < width);
            }
#endif
            // One after the other: together, both would have their tiles to see to at the same time afterwards.
            wait_for(turns + 8 * role, (tile & 1) ^ (role ^ 1));
            int block = tile * DEPTHS;
            #pragma unroll  // else the compiler lets each product wait for the one before
            for (int k = 0; k < DEPTHS; k++, block++) {
                const u32 stage = block % STAGES;
                wait_for(full + 8 * stage, block / STAGES & 1);
                const u64 b = describe(ring + stage * BLOCK_BYTES);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                #pragma unroll
                for (int i = 0; i < 4; i++) {  // descriptors count 16 bytes
                    const u64 step = b + (ACROSS ? 128 : 2) * i;
                    if (k < HELD) multiply(d, a[4 * k + i], step, k | i);
                    else multiply(d, describe(rest + (2 * (k - HELD) + role) * TILE_BYTES) + 2 * i, step, k | i);
                }
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                if (k) {
                    wait_products<1>();
                    if (lane == 0) arrive(empty + 8 * ((block - 1) % STAGES));
                }
            }
            if (thread == 0) arrive(turns + 8 * (role ^ 1));
            wait_products<0>();
            hold(d);
            if (lane == 0) arrive(empty + 8 * ((block - 1) % STAGES));

#if MODE == BACKWARD
            float totals[16];
            #pragma unroll
            for (int i = 0; i < 16; i++) totals[i] = 0;
#endif
            #pragma unroll
            for (int layer = 0; layer < PASSES; layer++, pass++) {
                const u32 tile_at = sets + (2 * role + pass % 2) * 2 * TILE_BYTES + own;
                u32 xs[16], ys[16];  // pairs: eight of one row, eight of the row eight below
                wait_for(loaded + 8 * (2 * role + pass % 2), pass / 2 & 1);
                #pragma unroll
                for (int i = 0; i < 16; i++) {
                    const u32 at = tile_at + i % 2 * 1024 + ((i / 2 ^ turn) << 4);
                    xs[i] = read_pair(at);
                    ys[i] = read_pair(at + TILE_BYTES);
                }
                #pragma unroll
                for (int i = 0; i < 16; i++) {
                    const u32 at = tile_at + i % 2 * 1024 + ((i / 2 ^ turn) << 4), x = xs[i], y = ys[i];
                    float& p = d[i / 2 * 4 + i % 2 * 2];
                    float& q = d[i / 2 * 4 + i % 2 * 2 + 1];
#if MODE == FORWARD  // x_0 and x_l become x_{l+1} and y_l
                    p += low(biases[i / 2]);
                    q += high(biases[i / 2]);
                    if (KEEPS) write_pair(at + TILE_BYTES, p, q);
                    write_pair(at, low(x) * p + low(y), high(x) * q + high(y));
#elif MODE == BACKWARD  // the gradient and x_0 become the new gradient and its product with x_0
                    p += low(x);
                    q += high(x);
                    write_pair(at, p, q);
                    p *= low(y);
                    q *= high(y);
                    write_pair(at + TILE_BYTES, p, q);
                    totals[i / 2 * 2] += p;
                    totals[i / 2 * 2 + 1] += q;
#else
                    p += low(x) * low(y);
                    q += high(x) * high(y);
                    if (layer == 0) {
                        p += low(x);
                        q += high(x);
                    }
                    if (layer == PASSES - 1) bad |= is_bad(write_pair(at, p, q)) && row + i % 2 * 8 < size;
#endif
                }
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                arrive(done + 8 * (2 * role + pass % 2));
            }

#if MODE == BACKWARD
            #pragma unroll
            for (int i = 0; i < 16; i++) {
                totals[i] += __shfl_xor_sync(0xffffffffu, totals[i], 4);
                totals[i] += __shfl_xor_sync(0xffffffffu, totals[i], 8);
                totals[i] += __shfl_xor_sync(0xffffffffu, totals[i], 16);
            }
            float* of_warps = (float*)(shared + (sums - sets)) + role * 4 * COLUMNS;
            if (lane < 4) {
                #pragma unroll
                for (int i = 0; i < 16; i++) of_warps[warp * COLUMNS + i / 2 * 8 + lane * 2 + i % 2] = totals[i];
            }
            asm volatile("bar.sync %0, 128;" :: "r"(role + 1) : "memory");
            if (thread < COLUMNS && column + thread < width && band * ROWS + role * 64 < size) {
                float total = 0;
                for (int i = 0; i < 4; i++) total += of_warps[i * COLUMNS + thread];
                partial[(u64)(2 * band + role) * width + column + thread] = total;
            }
            asm volatile("bar.sync %0, 128;" :: "r"(role + 1) : "memory");
#endif
        }
        if (bad && status) *status = 1;  // all threads that find a value store the same word
    }
}
"""
