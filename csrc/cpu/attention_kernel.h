// Attention of one item, with the vectors of one instruction set (simd.h). All has internal linkage: sources of different
// instruction sets must not share it.

#pragma once

#include "attention.h"
#include "simd.h"

namespace zero_inference::cpu {
namespace {

inline Vector load(const Float16* p) { return from_float16(reinterpret_cast<const char*>(p)); }
inline Vector load(const BFloat16* p) { return from_bfloat16(reinterpret_cast<const char*>(p)); }

inline void store(Float16* p, Vector x) { store_float16(reinterpret_cast<char*>(p), x); }
inline void store(BFloat16* p, Vector x) { store_bfloat16(reinterpret_cast<char*>(p), x); }

template <typename T>
constexpr Dtype kDtypeOf = Dtype::float32;
template <>
constexpr Dtype kDtypeOf<Float16> = Dtype::float16;
template <>
constexpr Dtype kDtypeOf<BFloat16> = Dtype::bfloat16;

// The first `count` elements, then zeros.
template <typename T>
inline Vector load(const T* p, int64_t count) {
  return from_part<kDtypeOf<T>>(reinterpret_cast<const char*>(p), count);
}

template <typename T>
inline void store(T* to, Vector x, int64_t count) {
  T lanes[kLanes];
  store(lanes, x);
  for (int64_t i = 0; i < count; ++i) to[i] = lanes[i];
}

constexpr int64_t kLine = 64;  // bytes of a cache line
constexpr float kNothing = -__builtin_inff();

template <typename T>
inline const T* row_at(const Attention& a, const CachedRows& rows, int64_t sequence, int64_t head, int64_t position) {
  return static_cast<const T*>(rows.data) + rows.batch * sequence + rows.head * head +
         rows.block * (position / a.block_positions) + rows.position * (position % a.block_positions);
}

template <typename T>
struct Kernel {
  const Attention& a;
  const int64_t sequence, kv_head, group, rows, query_stride, sum_stride;
  float* const queries;
  float* const sums;
  float* const largest;
  float* const weights;

  Kernel(const Attention& attention, int64_t group_index, float* scratch)
      : a(attention),
        sequence(group_index / attention.kv_heads),
        kv_head(group_index % attention.kv_heads),
        group(attention.heads / attention.kv_heads),
        rows(rows_of(attention)),
        query_stride(Scratch(attention).query_stride),
        sum_stride(Scratch(attention).sum_stride),
        queries(scratch),
        sums(scratch + Scratch(attention).sums),
        largest(scratch + Scratch(attention).largest),
        weights(scratch + Scratch(attention).weights) {}

  int64_t head_of(int64_t row) const { return kv_head * group + row / a.tokens; }
  int64_t token_of(int64_t row) const { return row % a.tokens; }
  int64_t own_position(int64_t row) const { return a.positions - a.tokens + token_of(row); }

  // exp(x), 0 below -86: Taylor polynomial of degree 6 on |r| <= ln(2) / 2, relative error 1.2e-7.
  static inline Vector exp(Vector x) {
    const Vector whole = round(x * broadcast(1.44269504f));
    Vector r =
        multiply_add(whole, broadcast(-0.693359375f), x);  // ln(2) in two parts, the first exact in any product with `whole`
    r = multiply_add(whole, broadcast(2.12194440e-4f), r);
    Vector y = broadcast(1.0f / 720);
    y = multiply_add(y, r, broadcast(1.0f / 120));
    y = multiply_add(y, r, broadcast(1.0f / 24));
    y = multiply_add(y, r, broadcast(1.0f / 6));
    y = multiply_add(y, r, broadcast(0.5f));
    y = multiply_add(y, r, broadcast(1.0f));
    y = multiply_add(y, r, broadcast(1.0f));
    return below(x, -86.0f, zero(), times_two_to(y, whole));
  }

  static float exp(float x) {
    float lanes[kLanes];
    store(lanes, exp(broadcast(x)));
    return lanes[0];
  }

  // cap * tanh(x / cap) = cap * (1 - 2 / (exp(2 x / cap) + 1))
  static inline Vector capped(Vector x, float cap) {
    Vector y = x * broadcast(2 / cap);
    y = below(y, -80.0f, broadcast(-80.0f), y);  // not by max, which drops a NaN
    y = zero() - y;
    y = below(y, -80.0f, broadcast(-80.0f), y);
    y = zero() - y;
    return (broadcast(-2 * cap) / (exp(y) + broadcast(1.0f))) + broadcast(cap);
  }

  void take_queries() {
    for (int64_t row = 0; row < rows; ++row) {
      const T* from = static_cast<const T*>(a.queries) + a.query_strides.batch * sequence +
                      a.query_strides.head * head_of(row) + a.query_strides.token * token_of(row);
      float* to = queries + row * query_stride;
      int64_t i = 0;
      for (; i + kLanes <= a.key_dim; i += kLanes) store(to + i, load(from + i) * broadcast(a.scale));
      if (i < a.key_dim) store(to + i, load(from + i, a.key_dim - i) * broadcast(a.scale));
      for (int64_t j = 0; j < sum_stride; j += kLanes) store(sums + row * sum_stride + j, zero());
      largest[row] = kNothing, weights[row] = 0.0f;
    }
  }

  static inline void prefetch(const T* row, int64_t count) {
    const char* bytes = reinterpret_cast<const char*>(row);
    for (int64_t i = 0; i < count * static_cast<int64_t>(sizeof(T)); i += kLine) __builtin_prefetch(bytes + i, 0, 3);
  }

  // logits[r][p] of kRows query rows and `count` keys; after `count` the last key repeats. Prefetches what is read next, a row
  // per key: 16 KB away, 1.6 us at 10 GB/s.
  template <int kRows>
  inline void multiply_keys(const float* query, const T* keys, int64_t count, float (*logits)[kPiece], const T* next,
                            int64_t next_count) const {
    constexpr int kKeys = kLanes / kRows;
    const int64_t stride = a.keys.position;
    for (int64_t p = 0; p < count; p += kKeys) {
      const T* key[kKeys];
      for (int j = 0; j < kKeys; ++j) {
        key[j] = keys + stride * (p + j < count ? p + j : count - 1);
        if (p + j < next_count) prefetch(next + a.values.position * (p + j), a.value_dim);
      }
      Vector products[kLanes];
      for (int i = 0; i < kLanes; ++i) products[i] = zero();
      int64_t i = 0;
      for (; i + kLanes <= a.key_dim; i += kLanes) {
        Vector q[kRows];
        for (int r = 0; r < kRows; ++r) q[r] = load(query + r * query_stride + i);
        for (int j = 0; j < kKeys; ++j) {
          const Vector k = load(key[j] + i);
          for (int r = 0; r < kRows; ++r) products[r * kKeys + j] = multiply_add(q[r], k, products[r * kKeys + j]);
        }
      }
      if (i < a.key_dim) {
        for (int j = 0; j < kKeys; ++j) {
          const Vector k = load(key[j] + i, a.key_dim - i);
          for (int r = 0; r < kRows; ++r) {
            products[r * kKeys + j] = multiply_add(load(query + r * query_stride + i), k, products[r * kKeys + j]);
          }
        }
      }
      float found[kLanes];
      sum_each(products, found);
      for (int r = 0; r < kRows; ++r) {
        for (int j = 0; j < kKeys; ++j) logits[r][p + j] = found[r * kKeys + j];
      }
    }
  }

  // Mask values of a row from `position` on.
  inline Vector mask_at(int64_t row, int64_t position, int64_t count) const {
    const int64_t at =
        a.mask_strides.batch * sequence + a.mask_strides.head * head_of(row) + a.mask_strides.token * token_of(row) + position;
    switch (a.mask_kind) {
      case Mask::none:
        return zero();
      case Mask::boolean: {
        float lanes[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          lanes[i] = i < count && static_cast<const uint8_t*>(a.mask)[at + i] == 0 ? kNothing : 0.0f;
        }
        return load(lanes);
      }
      case Mask::float32:
        return load(static_cast<const float*>(a.mask) + at, count);
      case Mask::float16:
        return load(static_cast<const Float16*>(a.mask) + at, count);
      case Mask::bfloat16:
        return load(static_cast<const BFloat16*>(a.mask) + at, count);
    }
    return zero();
  }

  // Applies cap, bias, mask and causality to logits; returns the largest.
  inline float finish_logits(int64_t row, int64_t position, int64_t count, float* logits) const {
    const int64_t own = own_position(row);
    const int64_t last = own + 1 - position < count ? own + 1 - position : count;
    const int64_t first = a.window > 0 ? own + 1 - a.window - position : 0;
    const float slope = a.slopes ? a.slopes[head_of(row)] : 0.0f;
    Vector most = broadcast(kNothing);
    for (int64_t i = 0; i < kPiece; i += kLanes) {
      Vector x = load(logits + i);
      if (a.softcap > 0) x = capped(x, a.softcap);
      if (a.slopes || a.mask_kind != Mask::none) {
        float distance[kLanes];
        for (int j = 0; j < kLanes; ++j) distance[j] = static_cast<float>(position + i + j - own);
        x = multiply_add(load(distance), broadcast(slope), x);
        if (i < count) x = x + mask_at(row, position + i, count - i < kLanes ? count - i : kLanes);
      }
      store(logits + i, x);
      if (i < first || i + kLanes > last) {
        for (int64_t j = i; j < i + kLanes; ++j) {
          if (j < first || j >= last) logits[j] = kNothing;
        }
        x = load(logits + i);
      }
      most = max(most, x);
    }
    return max_lane(most);
  }

  // Turns logits into weights relative to the largest so far, and rescales earlier sums. False: all are 0.
  inline bool take_weights(int64_t row, float most, float* logits) {
    if (most == kNothing) {
      for (int64_t i = 0; i < kPiece; ++i) logits[i] = 0.0f;
      return false;
    }
    const float before = largest[row];
    if (!(most <= before)) {
      const float shrink = before == kNothing ? 0.0f : exp(before - most);
      for (int64_t i = 0; i < sum_stride; i += kLanes) {
        float* sum = sums + row * sum_stride + i;
        store(sum, load(sum) * broadcast(shrink));
      }
      weights[row] *= shrink;
      largest[row] = most;
    }
    const Vector shift = broadcast(largest[row]);
    Vector total = zero();
    for (int64_t i = 0; i < kPiece; i += kLanes) {
      const Vector weight = exp(load(logits + i) - shift);
      store(logits + i, weight);
      total = total + weight;
    }
    weights[row] += sum(total);
    return true;
  }

  // sums[r] += weight[r][p] * value[p], for kVectors registers from element `at`.
  template <int kRows, int kVectors>
  inline void add_values(float* sum, int64_t at, const T* values, int64_t count, const float (*weight)[kPiece], const T* next,
                         int64_t next_count) const {
    const int64_t left = a.value_dim - at;
    const bool whole = left >= kVectors * kLanes;  // else kVectors is 1
    Vector total[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) total[r][v] = load(sum + r * sum_stride + at + v * kLanes);
    }
    for (int64_t p = 0; p < count; ++p) {
      const T* value = values + a.values.position * p + at;
      if (p < next_count) prefetch(next + a.keys.position * p, a.key_dim);
      Vector w[kRows];
      for (int r = 0; r < kRows; ++r) w[r] = broadcast(weight[r][p]);
      for (int v = 0; v < kVectors; ++v) {
        const Vector x = whole ? load(value + v * kLanes) : load(value + v * kLanes, left);
        for (int r = 0; r < kRows; ++r) total[r][v] = multiply_add(w[r], x, total[r][v]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) store(sum + r * sum_stride + at + v * kLanes, total[r][v]);
    }
  }

  template <int kRows>
  inline void multiply_values(float* sum, const T* values, int64_t count, const float (*weight)[kPiece], const T* next,
                              int64_t next_count) const {
    constexpr int kMax = kLanes / kRows < 8 ? kLanes / kRows : 8;
    int64_t at = 0;
    for (; at + kMax * kLanes <= a.value_dim; at += kMax * kLanes, next_count = 0) {
      add_values<kRows, kMax>(sum, at, values, count, weight, next, next_count);
    }
    if constexpr (kMax > 2) {
      for (; at + 2 * kLanes <= a.value_dim; at += 2 * kLanes, next_count = 0) {
        add_values<kRows, 2>(sum, at, values, count, weight, next, next_count);
      }
    }
    for (; at < a.value_dim; at += kLanes, next_count = 0) {
      add_values<kRows, 1>(sum, at, values, count, weight, next, next_count);
    }
  }

  // Positions [position, position + count), and how many of the next keys to prefetch.
  struct Piece {
    int64_t position, count, next_count;
    const T* keys;
    const T* values;
    const T* next_keys;
  };

  template <int kRows>
  inline void take_rows(int64_t row, const Piece& piece) {
    float logits[kRows][kPiece];
    const bool first = row == 0;
    multiply_keys<kRows>(queries + row * query_stride, piece.keys, piece.count, logits, piece.values, first ? piece.count : 0);
    for (int64_t i = piece.count; i < kPiece; ++i) {
      for (int r = 0; r < kRows; ++r) logits[r][i] = kNothing;
    }
    bool any = false;
    for (int r = 0; r < kRows; ++r) {
      const float most = finish_logits(row + r, piece.position, piece.count, logits[r]);
      any = take_weights(row + r, most, logits[r]) || any;
    }
    if (any) {
      multiply_values<kRows>(sums + row * sum_stride, piece.values, piece.count, logits, piece.next_keys,
                             first ? piece.next_count : 0);
    }
  }

  int64_t piece_end(int64_t position, int64_t end) const {
    const int64_t in_block = position % a.block_positions;
    const int64_t left = a.block_positions - in_block;
    const int64_t most = left < kPiece ? left : kPiece;
    return position + most < end ? position + most : end;
  }

  // Where the keys of the thread's next item begin, to be prefetched; null without one.
  const T* next_item_keys = nullptr;
  int64_t next_item_count = 0;

  void take_positions(int64_t begin, int64_t end) {
    for (int64_t position = begin; position < end;) {
      const int64_t next = piece_end(position, end);
      Piece piece;
      piece.position = position, piece.count = next - position;
      piece.keys = row_at<T>(a, a.keys, sequence, kv_head, position);
      piece.values = row_at<T>(a, a.values, sequence, kv_head, position);
      piece.next_count = next < end ? piece_end(next, end) - next : next_item_count;
      if (piece.next_count > piece.count) piece.next_count = piece.count;
      piece.next_keys = next < end ? row_at<T>(a, a.keys, sequence, kv_head, next) : next_item_keys;
      int64_t row = 0;
      for (; row + 4 <= rows; row += 4) take_rows<4>(row, piece);
      if (row + 2 <= rows) take_rows<2>(row, piece), row += 2;
      if (row < rows) take_rows<1>(row, piece);
      position = next;
    }
  }

  // Writes the output of a row; the sink joins the softmax here.
  void write(int64_t row, const float* sum, float most, float total) const {
    float shrink = 1.0f;
    if (a.sinks) {
      const float sink = a.sinks[head_of(row)];
      const float joint = sink > most ? sink : most;
      shrink = most == kNothing ? 0.0f : exp(most - joint);
      total = total * shrink + exp(sink - joint);
    }
    const Vector factor = broadcast(total == 0.0f ? 0.0f : shrink / total);
    T* to = static_cast<T*>(a.out) + a.out_strides.batch * sequence + a.out_strides.head * head_of(row) +
            a.out_strides.token * token_of(row);
    int64_t i = 0;
    for (; i + kLanes <= a.value_dim; i += kLanes) store(to + i, load(sum + i) * factor);
    if (i < a.value_dim) store(to + i, load(sum + i) * factor, a.value_dim - i);
  }

  // First position of `part`; of `splits`: the end.
  int64_t begin_of(int64_t part, int64_t splits) const {
    const int64_t size = a.block_positions < kPiece ? a.block_positions : kPiece;
    const int64_t seen = first_position(a), first = seen / size;
    const int64_t pieces = (a.positions + size - 1) / size - first;
    const int64_t begin = (first + pieces * part / splits) * size;
    return begin < seen ? seen : begin < a.positions ? begin : a.positions;
  }

  void set_next_item(int64_t item, int64_t splits) {
    const int64_t begin = begin_of(item % splits, splits), next_group = item / splits;
    next_item_keys = row_at<T>(a, a.keys, next_group / a.kv_heads, next_group % a.kv_heads, begin);
    next_item_count = piece_end(begin, begin_of(item % splits + 1, splits)) - begin;
  }

  void attend(int64_t part, int64_t splits, float* partial) {
    take_queries();
    take_positions(begin_of(part, splits), begin_of(part + 1, splits));
    if (splits == 1) {
      for (int64_t row = 0; row < rows; ++row) write(row, sums + row * sum_stride, largest[row], weights[row]);
      return;
    }
    for (int64_t i = 0; i < partial_floats(a); i += kLanes) store(partial + i, load(sums + i));
  }

  // Merges consecutive `partials` into the first.
  void merge(int64_t splits, float* partials) const {
    const int64_t stride = partial_floats(a);
    for (int64_t row = 0; row < rows; ++row) {
      float* const sum = partials + row * sum_stride;
      float* const state = partials + rows * sum_stride + row;  // largest logit; `rows` later, the sum of weights
      float most = kNothing, total = 0.0f;
      for (int64_t part = 0; part < splits; ++part) {
        if (!(state[part * stride] <= most)) most = state[part * stride];
      }
      for (int64_t part = 0; part < splits; ++part) {
        const float* from = sum + part * stride;
        const float share = state[part * stride] == kNothing ? 0.0f : exp(state[part * stride] - most);
        total += share * state[part * stride + rows];
        for (int64_t i = 0; i < a.value_dim; i += kLanes) {
          const Vector before = part == 0 ? zero() : load(sum + i);
          store(sum + i, multiply_add(broadcast(share), load(from + i), before));
        }
      }
      write(row, sum, most, total);
    }
  }
};

template <typename T>
void attend_items(const Attention& a, int64_t splits, int64_t first, int64_t last, float* scratch, float* partials) {
  for (int64_t item = first; item < last; ++item) {
    Kernel<T> kernel(a, item / splits, scratch);
    if (item + 1 < last) kernel.set_next_item(item + 1, splits);
    kernel.attend(item % splits, splits, partials + (splits == 1 ? 0 : item * partial_floats(a)));
  }
}

// Calls run(T{}) with the type of keys and values.
template <typename Run>
inline void with_type(Dtype dtype, const Run& run) {
  if (dtype == Dtype::float32) return run(float{});
  dtype == Dtype::float16 ? run(Float16{}) : run(BFloat16{});
}

inline void attend_with(const Attention& a, int64_t splits, int64_t first, int64_t last, float* scratch, float* partials) {
  with_type(a.dtype, [&](auto zero) { attend_items<decltype(zero)>(a, splits, first, last, scratch, partials); });
}

inline void merge_group(const Attention& a, int64_t splits, int64_t group, float* partials) {
  float* const first = partials + group * splits * partial_floats(a);
  with_type(a.dtype, [&](auto zero) { Kernel<decltype(zero)>(a, group, nullptr).merge(splits, first); });
}

}  // namespace
}  // namespace zero_inference::cpu
