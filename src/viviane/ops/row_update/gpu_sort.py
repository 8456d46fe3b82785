"""Sort rows and remember where each came from: a radix sort in one launch, with as many passes as the rows need.

torch.sort goes through all 32 bits in four passes and carries 64-bit places. Here rows are known to be below a bound:
25 bits take three passes, and places have 32 bits. The blocks of the launch wait for one another between the steps of
a pass, so that nothing is launched again:

    count      each block counts the rows of its part by their digit; a part of one tile is ranked at once, in the order
               in which the rows stand
    offsets    each digit's counts are summed over the blocks before, by one warp a digit
    scatter    each row goes to: rows of lower digits + rows of its digit in blocks before + its rank; a block first
               puts its own in order in shared memory, since single rows cost eight times what neighbours do

Equal rows keep their order, and nothing depends on which block or warp comes first: the result is torch's stable sort.
The first pass drops rows that are never updated, and divides the rest evenly among the blocks for the next passes. In a
table that is sharded by rows over four GPUs, three of four ids are such rows.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from viviane.ops.cuda_parts.compiling import Kernel, nvrtc
from viviane.ops.triton_parts.launch import ceil_div, multiprocessors

_THREADS = 1024
_DIGIT_BITS = 9
_COUNTERS = 32
_ITEMS = (1, 2, 4, 8, 14)
_ITEMS_OF_MANY_TILES = (14, 8)
_SIGN = -(2**31)

SOURCE = r"""
#define WARPS (THREADS / 32)
#define DIGITS (1 << DIGIT_BITS)
#define TILE (THREADS * ITEMS)
#define AHEAD 5
typedef unsigned int u32;

// Blocks wait here until all have come; `arrived` counts up and is never put back.
__device__ void wait_for_all(u32* arrived, u32 target) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(arrived, 1u);
        while (*(volatile u32*)arrived < target) {}
        __threadfence();
    }
    __syncthreads();
}

// The sum over the threads before, of DIGITS threads.
__device__ u32 sum_before(u32 value, u32* of_warps) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32 sum = value;
    for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) of_warps[warp] = sum;
    __syncthreads();
    u32 before = sum - value;
    for (u32 w = 0; w < warp && w < DIGITS / 32; w++) before += of_warps[w];
    return before;
}

// Whether a row takes part; limit 0: all do.
__device__ bool counts_in(u32 key, u32 limit) { return limit == 0u || key < limit; }

// Counts rows by their digit, as many as one thread's.
__device__ u32 count_digits(const u32* keys, u32 begin, u32 end, u32 flip, u32 limit, int shift, int bits,
                            u32* counts) {
    const u32 mask = (1u << bits) - 1;
    if (threadIdx.x < DIGITS) counts[threadIdx.x] = 0;
    __syncthreads();
    for (u32 start = begin + threadIdx.x; start < end; start += TILE) {
        u32 key[ITEMS];
        #pragma unroll
        for (int i = 0; i < ITEMS; i++) key[i] = start + i * THREADS < end ? __ldcg(keys + start + i * THREADS) : 0u;
        #pragma unroll
        for (int i = 0; i < ITEMS; i++)
            if (start + i * THREADS < end && counts_in(key[i], limit))
                atomicAdd(counts + (((key[i] ^ flip) >> shift) & mask), 1u);
    }
    __syncthreads();
    return threadIdx.x < DIGITS ? counts[threadIdx.x] : 0u;
}

// Ranks a tile's rows among those of their digit in the warp, and counts them by warp.
__device__ void rank_tile(const u32* keys, u32 start, u32 end, u32 flip, u32 limit, int shift, int bits,
                          unsigned short (*counts)[DIGITS], u32* key, unsigned short* rank) {
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const u32 first = start + warp * (32 * ITEMS) + lane, mask = (1u << bits) - 1;
    for (u32 i = threadIdx.x; i < WARPS * DIGITS / 2; i += THREADS) ((u32*)counts)[i] = 0;
    #pragma unroll
    for (int i = 0; i < ITEMS; i++) key[i] = first + i * 32 < end ? __ldcg(keys + first + i * 32) ^ flip : 0u;
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const bool here = first + i * 32 < end && counts_in(key[i], limit);
        const u32 digit = (key[i] >> shift) & mask;
        u32 same = __ballot_sync(0xffffffffu, here);
        #pragma unroll
        for (int bit = 0; bit < DIGIT_BITS; bit++) {
            const bool set = (digit >> bit) & 1;
            const u32 others = __ballot_sync(0xffffffffu, set);
            same &= set ? others : ~others;
        }
        const u32 before = here ? counts[warp][digit] : 0u;
        rank[i] = before + __popc(same & ((1u << lane) - 1));
        __syncwarp();
        if (here && lane == __ffs(same) - 1) counts[warp][digit] = before + __popc(same);
        __syncwarp();
    }
    __syncthreads();
}

// Turns counts by warp into those of the warps before, and returns their sum; one thread a digit.
__device__ u32 sum_warps(unsigned short (*counts)[DIGITS]) {
    u32 sum = 0;
    #pragma unroll 8
    for (int w = 0; w < WARPS; w++) {
        const u32 own = counts[w][threadIdx.x];
        counts[w][threadIdx.x] = sum;
        sum += own;
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) sort_rows(
    const u32* rows, u32* work, u32* sums, u32 n, int total_bits, int digit_bits, u32 sign, u32 part,
    u32 limit) {  // with a limit there is no sign
    extern __shared__ u32 shared[];  // keys and places of a tile, then counts by warp
    __shared__ u32 base[DIGITS], local[DIGITS], of_warps[WARPS], of_tile, of_all;
    u32* const tile_keys = shared;
    u32* const tile_places = shared + TILE;
    unsigned short (*counts)[DIGITS] = (unsigned short (*)[DIGITS])(shared + 2 * TILE);
    const u32 blocks = gridDim.x, block = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    u32* const arrived = sums;
    u32* const totals = sums + 32;
    u32* const by_block = totals + DIGITS;
    const u32* keys = rows;
    const u32* places = 0;
    u32 count = n, begin = block * part, end = min(begin + part, n);
    u32 phase = 0, key[ITEMS];
    unsigned short rank[ITEMS];
    int which = 0;
    for (int shift = 0; shift < total_bits; shift += digit_bits, which ^= 1) {
        const int bits = min(digit_bits, total_bits - shift);
        const u32 digits = 1u << bits, flip = shift == 0 ? sign : 0u, bar = shift == 0 ? limit : 0u;
        u32 own = 0;
        if (part <= TILE) {
            rank_tile(keys, begin, end, flip, bar, shift, bits, counts, key, rank);
            if (threadIdx.x < digits) own = sum_warps(counts);
            __syncthreads();
        } else {
            own = count_digits(keys, begin, end, flip, bar, shift, bits, local);
        }
        if (threadIdx.x < digits) __stcg(by_block + threadIdx.x * blocks + block, own);
        wait_for_all(arrived, ++phase * blocks);
        for (u32 digit = block + blocks * warp; digit < digits; digit += blocks * WARPS) {
            u32 sum = 0;
            for (u32 b = 0; b < blocks; b += 32 * AHEAD) {
                u32 count[AHEAD];
                #pragma unroll
                for (int j = 0; j < AHEAD; j++) {
                    const u32 at = b + j * 32 + lane;
                    count[j] = at < blocks ? __ldcg(by_block + digit * blocks + at) : 0u;
                }
                #pragma unroll
                for (int j = 0; j < AHEAD; j++) {
                    const u32 at = b + j * 32 + lane;
                    u32 upto = count[j];
                    for (int step = 1; step < 32; step *= 2) {
                        const u32 other = __shfl_up_sync(0xffffffffu, upto, step);
                        if (lane >= step) upto += other;
                    }
                    if (at < blocks) __stcg(by_block + digit * blocks + at, sum + upto - count[j]);
                    sum += __shfl_sync(0xffffffffu, upto, 31);
                }
            }
            if (lane == 0) __stcg(totals + digit, sum);
        }
        wait_for_all(arrived, ++phase * blocks);
        const u32 total = threadIdx.x < digits ? __ldcg(totals + threadIdx.x) : 0u;
        const u32 lower = sum_before(total, of_warps);
        if (threadIdx.x < digits) base[threadIdx.x] = lower + __ldcg(by_block + threadIdx.x * blocks + block);
        if (threadIdx.x == digits - 1) of_all = lower + total;
        u32* const next_keys = work + (size_t)which * 2 * n;
        u32* const next_places = next_keys + n;
        const u32 back = shift + digit_bits >= total_bits ? sign : 0u, mask = digits - 1;
        for (u32 start = begin; start < end; start += TILE) {
            const u32 mine = warp * (32 * ITEMS) + lane;
            if (part > TILE) {  // of a single tile everything is still there
                rank_tile(keys, start, end, flip, bar, shift, bits, counts, key, rank);
                if (threadIdx.x < digits) own = sum_warps(counts);
            }
            __syncthreads();
            // Put the tile in order in shared memory, so that neighbours go to neighbouring places.
            const u32 before = sum_before(threadIdx.x < digits ? own : 0u, of_warps);
            if (threadIdx.x < digits) {
                local[threadIdx.x] = before;
                base[threadIdx.x] -= before;
            }
            if (threadIdx.x == digits - 1) of_tile = before + own;
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < ITEMS; i++) {
                const u32 from = start + mine + i * 32;
                if (from < end && counts_in(key[i], bar)) {
                    const u32 digit = (key[i] >> shift) & mask, to = local[digit] + counts[warp][digit] + rank[i];
                    tile_keys[to] = key[i];
                    tile_places[to] = places ? __ldcg(places + from) : from;
                }
            }
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < ITEMS; i++) {
                const u32 from = i * THREADS + threadIdx.x;
                if (from < of_tile) {
                    const u32 one = tile_keys[from], to = base[(one >> shift) & mask] + from;
                    __stcg(next_keys + to, one ^ back);
                    __stcg(next_places + to, tile_places[from]);
                }
            }
            __syncthreads();
            if (threadIdx.x < digits) base[threadIdx.x] += before + own;
        }
        if (bar) {
            __syncthreads();
            count = of_all;
            part = ((count + blocks - 1) / blocks + 31) / 32 * 32;
            begin = min(block * part, count);
            end = min(begin + part, count);
        }
        keys = next_keys;
        places = next_places;
        if (shift + digit_bits < total_bits) wait_for_all(arrived, ++phase * blocks);
    }
    u32* const left_out = work + (size_t)(which ^ 1) * 2 * n;
    for (u32 i = count + block * THREADS + threadIdx.x; i < n; i += blocks * THREADS) {
        __stcg(left_out + i, limit);
        __stcg(left_out + n + i, 0u);
    }
}
"""


def sort_rows(
    rows: Tensor, bound: int | None, *, skipped: int = 0, beside: bool = False, spare: int = 0
) -> tuple[Tensor, Tensor]:
    """Sort rows; equal ones in their original order.

    Args:
        rows: (N,), int32 or int64.
        bound: of rows that are all 0 <= row < bound; None where that is not known.
        skipped: this many rows below the bound come last, in any order, and may be given as the first of them, from
            place 0.
        beside: leave half of each multiprocessor to kernels that run at the same time; takes a fourth longer alone.
        spare: multiprocessors to leave to a kernel that holds them for long.

    Returns:
        rows in rising order, and the place that each came from, int32 or int64; (N,) each.

    Example:
        >>> [part.tolist() for part in sort_rows(torch.tensor([7, 2, 7]), 8)]
        [[2, 7, 7], [1, 0, 2]]
    """
    if not rows.is_cuda or rows.dtype != torch.int32 or not 0 < len(rows) < 2**31 or nvrtc() is None:
        found, order = torch.sort(rows, stable=True)
        return found, order
    count, device = len(rows), rows.device
    limit = 0 if bound is None or not skipped else bound - skipped
    bits = 32 if bound is None else max(1, ((limit or bound) - 1).bit_length())
    threads = _THREADS // 2 if beside else _THREADS
    blocks, items, part = sort_shape(count, max(1, multiprocessors(device) - spare), threads)
    passes = ceil_div(bits, _DIGIT_BITS)
    digit_bits = ceil_div(bits, passes)
    work = torch.empty(4 * count, dtype=torch.int32, device=device)
    sums = torch.empty(_COUNTERS + (blocks + 1 << digit_bits), dtype=torch.int32, device=device)
    sums[:_COUNTERS].zero_()
    sign = _SIGN if bound is None else 0
    pointers = [ctypes.c_void_p(one.data_ptr()) for one in (rows, work, sums)]
    numbers = [ctypes.c_int(one) for one in (count, bits, digit_bits, sign, part, limit)]
    shared = _shared_bytes(threads, items, digit_bits)
    _kernel(threads, items, digit_bits, device).launch_together(blocks, threads, [*pointers, *numbers], shared)
    start = 2 * count * ((passes - 1) & 1)
    return work[start : start + count], work[start + count : start + 2 * count]


def sort_shape(count: int, multiprocessors: int, threads: int) -> tuple[int, int, int]:
    """Choose blocks, rows a thread has of a tile, and rows a block.

    Of many rows each multiprocessor gets as many, in tiles of whichever size leaves the last one least empty.

    Example:
        >>> sort_shape(1_048_570, 132, 1024), sort_shape(53_248, 132, 1024), sort_shape(3_506_176, 132, 1024)
        ((128, 8, 8192), (52, 1, 1024), (132, 14, 26592))
    """
    items = next((one for one in _ITEMS if count <= one * threads * multiprocessors), None)
    if items is not None:
        return ceil_div(count, items * threads), items, items * threads
    part = ceil_div(ceil_div(count, multiprocessors), 32) * 32
    items = min(_ITEMS_OF_MANY_TILES, key=lambda one: ceil_div(part, one * threads) * one)
    return ceil_div(count, part), items, part


@cache
def _kernel(threads: int, items: int, digit_bits: int, device: torch.device) -> Kernel:
    defines = {"THREADS": threads, "ITEMS": items, "DIGIT_BITS": digit_bits}
    return Kernel(SOURCE, "sort_rows", defines, device, _shared_bytes(threads, items, digit_bits))


def _shared_bytes(threads: int, items: int, digit_bits: int) -> int:
    return 8 * items * threads + (2 << digit_bits) * threads // 32
