// The fused update of ffi/device/cell_update.inl over the threads of a device, and the store of one word.
//
// 1. Each block of threads has a run of cells, of one segment after another.
// 2. Of a cell each thread has kQuads quads, a block's width apart: in each step the threads of a warp read
//    and write adjacent quads. So transfers to and from the host are of whole cache lines wherever a segment
//    lies at a multiple of 16 bytes (of 8, where elements have 16 bits), and of single elements elsewhere.
// 3. The products of a cell's params are summed up over warps, and those sums over the blocks of kBlock
//    params.
//
// What always holds: records lie in pinned host memory, which the host does not touch meanwhile. The compile
// flags (CMakeLists.txt) flush denormals, contract nothing and round divisions and roots correctly. Thread
// contract: as kernels.h.
#include "ffi/cuda/kernels.h"

namespace jmo {
namespace {

#include "ffi/device/cell_update.inl"

constexpr int kThreads = 512;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr int kQuads = static_cast<int>(kCellElements) / kGroup / kThreads;
constexpr int kSums = kQuads * kWarps;  // of a cell, one a warp and quad
constexpr int kHashBlocks = static_cast<int>(kCellElements) / kBlock;
constexpr int kSumsPerHashBlock = kSums / kHashBlocks;
static_assert(kQuads * kThreads * kGroup == kCellElements && kSums % kHashBlocks == 0 && kHashBlocks <= kWarp,
              "threads tile a cell, and warps the blocks of its hash");

// The link to the host is what limits an update, and a few blocks fill it: each has up to 64 KiB on their
// way, all together more than any link moves in the few microseconds that an access takes. XLA's work goes on
// beside them.
constexpr int64_t kMostBlocks = 32;

// What the threads of a block tell each other, and what all of them read.
struct Shared {
  Rules rules;
  Segment segment;
  unsigned long long sums[kSums];
  uint32_t hash;
};

__device__ __forceinline__ unsigned long long over_warp(unsigned long long value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}

// The hash of a cell of n params, of each thread's products; all threads of the block take part and get it.
__device__ __forceinline__ uint32_t hash_over_block(Shared& shared, const uint64_t (&products)[kQuads],
                                                    int n) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  JMO_UNROLL
  for (int q = 0; q < kQuads; ++q) {
    const unsigned long long sum = over_warp(products[q]);
    if (lane == 0) shared.sums[q * kWarps + warp] = sum;
  }
  __syncthreads();
  if (warp == 0) {
    uint64_t sum = 0;
    if (lane < kHashBlocks) {
      for (int i = 0; i < kSumsPerHashBlock; ++i) sum += shared.sums[lane * kSumsPerHashBlock + i];
    }
    const bool has_params = lane < kHashBlocks && lane * kBlock < n;
    const auto hash = static_cast<uint32_t>(over_warp(has_params ? share(sum, lane) : 0u));  // modulo 2^32
    if (lane == 0) shared.hash = settled(hash);
  }
  __syncthreads();
  return shared.hash;
}

// What of a cell with n elements is the thread's quad.
__device__ __forceinline__ int quad_begin(int q) {
  return (q * kThreads + static_cast<int>(threadIdx.x)) * kGroup;
}
__device__ __forceinline__ int quad_count(int q, int n) {
  const int left = n - quad_begin(q);
  return left < 0 ? 0 : left < kGroup ? left : kGroup;
}

// Updates a cell; returns, to all threads, whether its params were replaced from outside.
__device__ __forceinline__ bool update_cell(Shared& shared, int64_t begin) {
  const Rules& rules = shared.rules;
  const Segment& segment = shared.segment;
  const int64_t left = segment.count - begin;
  const int n = static_cast<int>(left < kCellElements ? left : kCellElements);
  const bool guarded = is_guarded(rules.spec);
  uint32_t* const kept = guarded ? segment.cells + begin / kCellElements : nullptr;
  const uint32_t kept_hash = guarded && !rules.fresh ? *kept : 0u;
  Operands in[kQuads];
  JMO_UNROLL
  for (int q = 0; q < kQuads; ++q) {
    in[q] = load_operands(rules, segment, begin + quad_begin(q), quad_count(q, n));
  }
  uint64_t products[kQuads];
  bool trusted = !rules.fresh, adopted = false;
  if (guarded && !rules.fresh) {
    JMO_UNROLL
    for (int q = 0; q < kQuads; ++q) {
      const uint64_t product = product_of_params(in[q].param, rules.spec.param, begin + quad_begin(q));
      products[q] = quad_count(q, n) > 0 ? product : 0u;
    }
    const uint32_t found = hash_over_block(shared, products, n);
    trusted = is_trusted(kept_hash, found);
    adopted = is_adopted(kept_hash, found);
  }
  JMO_UNROLL
  for (int q = 0; q < kQuads; ++q) {
    const int count = quad_count(q, n);
    const int64_t index = begin + quad_begin(q);
    products[q] = count > 0 ? update_quad(rules, segment, in[q], trusted, index, count) : 0u;
  }
  if (guarded) {
    const uint32_t hash = hash_over_block(shared, products, n);
    if (threadIdx.x == 0) *kept = hash;
  }
  return adopted;
}

// The last of the segments that begin at or before a cell: the one that has it, since those without cells
// come before.
__device__ __forceinline__ int segment_of(const DeviceUpdate& update, int64_t cell) {
  int low = 0, high = update.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (update.first_cell[middle] <= cell) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

__global__ void __launch_bounds__(kThreads) update_cells(const DeviceUpdate update, const int64_t cells) {
  __shared__ Shared shared;
  if (threadIdx.x == 0) shared.rules = rules_of(update);
  int64_t cell = cells * blockIdx.x / gridDim.x;
  const int64_t end = cells * (blockIdx.x + 1) / gridDim.x;
  for (int s = segment_of(update, cell); cell < end; ++s) {
    __syncthreads();  // nobody reads the one before any more
    if (threadIdx.x == 0) shared.segment = update.segments[s];
    __syncthreads();
    const int64_t first = update.first_cell[s], past = update.first_cell[s + 1];
    int64_t adopted = 0;
    for (; cell < end && cell < past; ++cell) {
      adopted += update_cell(shared, (cell - first) * kCellElements);
    }
    if (threadIdx.x == 0 && adopted > 0) {  // other blocks may have cells of this segment
      atomicAdd(reinterpret_cast<unsigned long long*>(update.adopted_cells + s),
                static_cast<unsigned long long>(adopted));
    }
  }
}

__global__ void set_word(uint32_t* to, uint32_t value) { *to = value; }

}  // namespace

namespace cuda {

cudaError_t load_kernels() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, update_cells);
  return error != cudaSuccess ? error : cudaFuncGetAttributes(&attributes, set_word);
}

cudaError_t launch_update(const DeviceUpdate& update, int64_t cells, cudaStream_t stream) {
  DeviceUpdate by_value = update;
  void* arguments[] = {&by_value, &cells};
  const dim3 blocks(static_cast<unsigned>(cells < kMostBlocks ? cells : kMostBlocks));
  return cudaLaunchKernel(update_cells, blocks, dim3(kThreads), arguments, 0, stream);
}

cudaError_t launch_set_u32(uint32_t* to, uint32_t value, cudaStream_t stream) {
  void* arguments[] = {&to, &value};
  return cudaLaunchKernel(set_word, dim3(1), dim3(1), arguments, 0, stream);
}

}  // namespace cuda
}  // namespace jmo
