// The kernels of reference.py in one pass over memory each, with the same bits.
//
// Compiled with -ffp-contract=off and without -ffast-math: every operation is rounded once, as torch does it, so the
// width of vectors does not show.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

namespace {

constexpr int64_t BLOCK = 4096;          // elements that are looked at, and then added: they stay in the first cache
constexpr int64_t A_THREAD = 1 << 19;    // elements that are worth starting a thread for
constexpr int64_t NORM_BLOCK = 32;       // reference.BLOCK
constexpr uint32_t MAGNITUDE = 0x7fffffff;

enum Type : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

struct Float32 {
  using Stored = uint32_t;
  static float load(Stored bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
};

struct BFloat16 {
  using Stored = uint16_t;
  static float load(Stored bits) { return Float32::load(uint32_t(bits) << 16); }
};

struct Float16 {
  using Stored = uint16_t;
  // Denormals lie where numbers just below 2^-13 do, minus 2^-14, which is exact and needs no denormal float32.
  static float load(Stored bits) {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = uint32_t(bits & 0x7fff) << 13;
    const float denormal = Float32::load(rest + (113u << 23)) - 0x1p-14f;
    const float normal = Float32::load(rest >= 0x0f800000 ? rest | 0x7f800000 : rest + (112u << 23));
    const float size = rest < 0x00800000 ? denormal : normal;
    uint32_t found;
    std::memcpy(&found, &size, sizeof found);
    return Float32::load(sign | found);
  }
};

uint32_t magnitude(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & MAGNITUDE;
}

// Call part(begin, end, index) for the parts of n elements, on so many threads if they are worth it.
template <typename Part>
void in_parts(int64_t n, int32_t threads, const Part& part) {
  const int64_t parts = std::clamp<int64_t>(n / A_THREAD, 1, threads);
  const int64_t each = (n / parts + BLOCK - 1) / BLOCK * BLOCK;
  std::vector<std::thread> others;
  for (int64_t index = 1; index < parts; ++index) {
    const int64_t begin = std::min(index * each, n), end = index + 1 == parts ? n : std::min(begin + each, n);
    try {
      others.emplace_back(part, begin, end, index);
    } catch (const std::system_error&) {  // there are no more threads
      part(begin, end, index);
    }
  }
  part(0, parts == 1 ? n : std::min(each, n), 0);
  for (auto& other : others) other.join();
}

template <typename T>
int64_t fixed(typename T::Stored bits, float scale) {
  return int64_t(T::load(bits) * scale);
}

// Add until something is beyond the limit, and return how many elements have been added.
template <typename T>
int64_t add_within(int64_t* total, const typename T::Stored* value, int64_t n, float scale, double factor,
                   double limit) {
  for (int64_t begin = 0; begin < n; begin += BLOCK) {
    const int64_t end = std::min(begin + BLOCK, n);
    uint32_t largest = 0;  // integers are ordered as the sizes of floats are, nan last
    for (int64_t i = begin; i < end; ++i) largest = std::max(largest, magnitude(T::load(value[i])));
    if (!(factor * double(Float32::load(largest)) < limit)) return begin;
    for (int64_t i = begin; i < end; ++i) total[i] = int64_t(uint64_t(total[i]) + uint64_t(fixed<T>(value[i], scale)));
  }
  return n;
}

template <typename T>
bool quantise_add(int64_t* total, const void* values, int64_t n, float scale, double factor, double limit,
                  int32_t threads) {
  const auto* value = static_cast<const typename T::Stored*>(values);
  struct Range {
    int64_t begin = 0, end = 0, added = 0;
  };
  std::vector<Range> ranges(threads);
  in_parts(n, threads, [&](int64_t begin, int64_t end, int64_t index) {
    ranges[index] = {begin, end, add_within<T>(total + begin, value + begin, end - begin, scale, factor, limit)};
  });
  if (std::all_of(ranges.begin(), ranges.end(), [](const Range& r) { return r.added == r.end - r.begin; })) return true;
  for (const Range& range : ranges)
    for (int64_t i = range.begin; i < range.begin + range.added; ++i)
      total[i] = int64_t(uint64_t(total[i]) - uint64_t(fixed<T>(value[i], scale)));
  return false;
}

template <typename T>
void block_squares(double* sums, const void* values, int64_t blocks) {
  const auto* value = static_cast<const typename T::Stored*>(values);
  for (int64_t block = 0; block < blocks; ++block, value += NORM_BLOCK) {
    double squares[NORM_BLOCK];
    for (int64_t i = 0; i < NORM_BLOCK; ++i) {
      const double each = T::load(value[i]);
      squares[i] = each * each;
    }
    for (int64_t half = NORM_BLOCK / 2; half > 0; half /= 2)
      for (int64_t i = 0; i < half; ++i) squares[i] += squares[i + half];
    sums[block] = squares[0];
  }
}

float mean_of_sum(uint64_t sum, double by) { return float(double(int64_t(sum)) * by); }

// All parts are read side by side, which is two to three times as fast as one after the other (measured).
template <int COUNT>
void mean_of(float* mean, const int64_t* const* parts, int64_t begin, int64_t end, double by) {
  const int64_t* part[COUNT];
  std::copy_n(parts, COUNT, part);
  for (int64_t i = begin; i < end; ++i) {
    uint64_t sum = 0;
    for (int nth = 0; nth < COUNT; ++nth) sum += uint64_t(part[nth][i]);
    mean[i] = mean_of_sum(sum, by);
  }
}

void mean_of_many(float* mean, const int64_t* const* parts, int64_t count, int64_t from, int64_t to, double by) {
  uint64_t sums[BLOCK];
  for (int64_t begin = from; begin < to; begin += BLOCK) {
    const int64_t size = std::min(BLOCK, to - begin);
    std::fill_n(sums, size, 0);
    for (int64_t nth = 0; nth < count; ++nth) {
      const int64_t* part = parts[nth] + begin;
      for (int64_t i = 0; i < size; ++i) sums[i] += uint64_t(part[i]);
    }
    for (int64_t i = 0; i < size; ++i) mean[begin + i] = mean_of_sum(sums[i], by);
  }
}

}  // namespace

extern "C" {

// total += value * factor, where scale is factor in fixed point. False if a product is not within the limit: then the
// total is as it was.
int32_t megatron_elastic_quantise_add(int64_t* total, const void* value, int32_t type, int64_t n, float scale,
                                      double factor, double limit, int32_t threads) {
  switch (type) {
    case FLOAT32: return quantise_add<Float32>(total, value, n, scale, factor, limit, threads);
    case BFLOAT16: return quantise_add<BFloat16>(total, value, n, scale, factor, limit, threads);
    default: return quantise_add<Float16>(total, value, n, scale, factor, limit, threads);
  }
}

// mean = (sum of the parts) * by, rounded to float64 twice and then to float32.
void megatron_elastic_mean(float* mean, const int64_t* const* parts, int64_t count, int64_t n, double by,
                           int32_t threads) {
  in_parts(n, threads, [=](int64_t begin, int64_t end, int64_t) {
    switch (count) {
      case 1: return mean_of<1>(mean, parts, begin, end, by);
      case 2: return mean_of<2>(mean, parts, begin, end, by);
      case 3: return mean_of<3>(mean, parts, begin, end, by);
      case 4: return mean_of<4>(mean, parts, begin, end, by);
      case 5: return mean_of<5>(mean, parts, begin, end, by);
      case 6: return mean_of<6>(mean, parts, begin, end, by);
      case 7: return mean_of<7>(mean, parts, begin, end, by);
      case 8: return mean_of<8>(mean, parts, begin, end, by);
      default: return mean_of_many(mean, parts, count, begin, end, by);
    }
  });
}

// squares[i] = the sum of the squares of block i, halves added to each other.
void megatron_elastic_block_squares(double* sums, const void* value, int32_t type, int64_t blocks) {
  switch (type) {
    case FLOAT32: return block_squares<Float32>(sums, value, blocks);
    case BFLOAT16: return block_squares<BFloat16>(sums, value, blocks);
    default: return block_squares<Float16>(sums, value, blocks);
  }
}

// A step of Adam. shrink multiplies the weights; decay, unless it is 0, times the weights goes to the gradient.
void megatron_elastic_adam(float* weights, const float* grad, float* exp_avg, float* exp_avg_sq, int64_t n,
                           const double* numbers, int32_t threads) {
  float rounded[9];
  std::transform(numbers, numbers + 9, rounded, [](double number) { return float(number); });
  const auto [shrink, decay, keep, take, keep_sq, take_sq, unbias, eps, move] = rounded;
  const bool decays = numbers[1] != 0;
  in_parts(n, threads, [=](int64_t begin, int64_t end, int64_t) {
    for (int64_t i = begin; i < end; ++i) {
      const float g = decays ? grad[i] + weights[i] * decay : grad[i];
      const float first = exp_avg[i] * keep + g * take;
      const float second = exp_avg_sq[i] * keep_sq + g * take_sq * g;
      exp_avg[i] = first;
      exp_avg_sq[i] = second;
      weights[i] = weights[i] * shrink + first * move / (std::sqrt(second) * unbias + eps);
    }
  });
}

}  // extern "C"
