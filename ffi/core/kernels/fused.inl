// The most frequent case, Adam for bf16 params with f32 moments, in one loop over pairs of vectors: the same
// bits as the separate steps of run.inl give.
//
// What always holds: the loop handles numbers that divide.inl can divide and params that apply_updates stores
// as they are rounded; a pair with anything else, and what is left at the end, take the separate steps.
// Included by run.inl only, inside namespace jmo::kernels::JMO_ISA. Thread contract: pure functions.

struct Bf16Operands {
  const char* grad;  // f32 or bf16
  const u16u* param;
  f32u* mu;
  f32u* nu;
  u16u* remainder;
  uint16_t* next;
};

// What the loop keeps in registers beside the factors.
struct Bf16Constants {
  Orders orders;
  VUint large, half_unit, upper_half;
};
JMO_INLINE Bf16Constants bf16_constants() {
  return {orders(), large_bits(), kept(VUint{} + 0x8000u), kept(VUint{} + 0xFFFF0000u)};
}

template <int kHalf>
JMO_INLINE VFloat widened_half(const Orders&, const f32u* grad) {
  return load(grad + kHalf * kLanes);
}
template <int kHalf>
JMO_INLINE VFloat widened_half(const Orders& orders, const u16u* grad) {
  return as_float(raised<kHalf>(orders, load(grad)));
}

// A pair between the two halves of its way.
struct Bf16Vector {
  VFloat mu_hat, nu_root, master;
};
struct Bf16Pair {
  Bf16Vector first, second;
  Lanes divided;  // whether divide.inl could divide
};

// Vector by vector, since GCC would copy the whole through memory.
JMO_INLINE void copy_pair(const Bf16Pair& from, Bf16Pair& to) {
  to.first.mu_hat = from.first.mu_hat, to.second.mu_hat = from.second.mu_hat;
  to.first.nu_root = from.first.nu_root, to.second.nu_root = from.second.nu_root;
  to.first.master = from.first.master, to.second.master = from.second.master;
  to.divided = from.divided;
}

// The first half of the way: the moments, up to the square root. `least` becomes the smallest dividend.
template <bool kNesterov>
JMO_INLINE Bf16Vector moved_vector(const AdamFactors& h, VFloat g, f32u* mu, f32u* nu, VUint master,
                                   VFloat& least) {
  const Moments<VFloat> next = moved(h, g, load(mu), load(nu));
  store(mu, next.mu);
  store(nu, next.nu);
  least = smallest_dividend<kNesterov>(next, g);
  return {corrected_mu<kNesterov>(h, g, next.mu), corrected_root(h, next.nu), as_float(master)};
}

template <bool kNesterov, typename GradAt>
JMO_INLINE Bf16Pair moved_pair(const AdamFactors& h, const Bf16Constants& c, const Bf16Operands& in,
                               const GradAt* grad, int i) {
  // param * 2^16 + remainder, in steps of 16 bits.
  const VHalves rest = load(in.remainder + i);
  const VHalves high = load(in.param + i) + reinterpret_cast<VHalves>(reinterpret_cast<VShorts>(rest) >> 15);
  VFloat least1, least2;
  const Bf16Vector first = moved_vector<kNesterov>(h, widened_half<0>(c.orders, grad + i), in.mu + i,
                                                   in.nu + i, joined<0>(c.orders, rest, high), least1);
  const Bf16Vector second =
      moved_vector<kNesterov>(h, widened_half<1>(c.orders, grad + i), in.mu + i + kLanes, in.nu + i + kLanes,
                              joined<1>(c.orders, rest, high), least2);
  return {first, second, are_dividends(smaller(least1, least2), c.large)};
}

// Of a pair whose moments have been moved.
template <bool kNesterov, typename GradAt>
JMO_INLINE bool has_dividends(const Bf16Constants& c, const Bf16Operands& in, const GradAt* grad, int i) {
  return has_dividends<kNesterov>({load(in.mu + i), load(in.nu + i)}, widened_half<0>(c.orders, grad + i)) &&
         has_dividends<kNesterov>({load(in.mu + i + kLanes), load(in.nu + i + kLanes)},
                                  widened_half<1>(c.orders, grad + i));
}

template <bool kDecay>
JMO_INLINE VFloat new_master(const AdamFactors& h, const Bf16Vector& v) {
  return v.master + update_of<kDecay>(h, v.mu_hat, v.nu_root, v.master);
}

// Lanes in which apply_updates stores the new param as it is. (`after - before` is right for equal ones but
// infinities, whose NaN differs from them; so does -0, which apply_updates makes +0.)
JMO_INLINE Lanes with_stored(Lanes lanes, VUint before, VUint after) {
  const VFloat from = as_float(before), to = as_float(after);
  return with_same(lanes, as_bits(from + (to - from)), after);
}

// The second half: the new params and remainders, stored only if all is of the usual kind. No NaN gets
// through: one in a moment, a master or a quotient is one in the new master. The remainder fits by
// construction.
template <bool kDecay>
JMO_INLINE bool split_pair(const AdamFactors& h, const Bf16Constants& c, const Bf16Operands& in,
                           const Bf16Pair& pair, int i) {
  const VHalves params = load(in.param + i);
  const VFloat first = new_master<kDecay>(h, pair.first), second = new_master<kDecay>(h, pair.second);
  const VUint first_up = as_bits(first) + c.half_unit, second_up = as_bits(second) + c.half_unit;
  Lanes usual = both_numbers(first, second);
  usual = with_stored(usual, raised<0>(c.orders, params), first_up & c.upper_half);
  usual = with_stored(usual, raised<1>(c.orders, params), second_up & c.upper_half);
  if (__builtin_expect(!all(usual), false)) return false;
  store(in.remainder + i, packed<false>(c.orders, as_bits(first), as_bits(second)));
  store(in.next + i, packed<true>(c.orders, first_up, second_up));
  return true;
}

// The separate steps, for at most kPair elements whose moments have been moved, but may hold NaNs of any
// kind. Returns by how much the sum of the stored params is more than that of the new ones.
template <bool kDecay, bool kNesterov>
__attribute__((noinline)) uint64_t finish_apart(const AdamFactors& h, DType grad_type, const Bf16Operands& in,
                                                int at, int n) {
  float grad[kPair], master[kPair], update[kPair];
  uint16_t stored[kPair];
  Operands operands{};
  operands.grad = reinterpret_cast<const f32u*>(in.grad) + at;
  if (grad_type == DType::kBF16) {
    widen_bf16(reinterpret_cast<const u16u*>(in.grad) + at, grad, n);
    operands.grad = grad;
  }
  join_masters(in.param + at, in.remainder + at, master, n);
  operands.mu = operands.mu_out = in.mu + at;
  operands.nu = operands.nu_out = in.nu + at;
  operands.master = master;
  operands.update = update;
  adam_divided<kDecay, kNesterov, true>(h, operands, 0, n);
  finish_bf16(in.param + at, master, update, in.next + at, stored, in.remainder + at, n);
  return sum_params<Form::kAny>(stored, DType::kBF16, at, n) -
         sum_params<Form::kNumbers>(in.next + at, DType::kBF16, at, n);
}

JMO_INLINE float widened(const f32u* grad) { return *grad; }
JMO_INLINE float widened(const u16u* grad) { return from_bf16(*grad); }

// Returns the sum of the stored params.
template <bool kDecay, bool kNesterov, DType kGrad, typename GradAt>
__attribute__((noinline)) uint64_t adam_bf16(const AdamFactors& factors, const Bf16Operands& operands,
                                             int n) {
  const AdamFactors h = factors;
  const Bf16Operands in = operands;
  const Bf16Constants c = bf16_constants();
  const GradAt* grad = reinterpret_cast<const GradAt*>(in.grad);
  const int whole = n - n % kPair;
  uint64_t left =
      0;  // a bit for each pair to be finished apart: a call in the loop would cost it its registers
  const auto finish = [&](const Bf16Pair& pair, int i) __attribute__((always_inline)) {
    const bool divided = !kMultiplies || all(pair.divided) || has_dividends<kNesterov>(c, in, grad, i);
    if (__builtin_expect(!divided || !split_pair<kDecay>(h, c, in, pair, i), false)) {
      left |= uint64_t{1} << (i / kPair);
    }
  };
  if (kLanes < 16) {
    for (int i = 0; i < whole; i += kPair) finish(moved_pair<kNesterov>(h, c, in, grad, i), i);
  } else if (whole > 0) {
    // Each pair is finished one behind, so that the processor finds work while it waits for the divider.
    // (Where there are but 16 registers, the pair between would not fit.)
    Bf16Pair pair = moved_pair<kNesterov>(h, c, in, grad, 0);
    for (int i = kPair; i < whole; i += kPair) {
      const Bf16Pair next = moved_pair<kNesterov>(h, c, in, grad, i);
      finish(pair, i - kPair);
      copy_pair(next, pair);
    }
    finish(pair, whole - kPair);
  }
  for (int i = whole; i < n; ++i) {
    const Moments<float> next = moved<float>(h, widened(grad + i), in.mu[i], in.nu[i]);
    in.mu[i] = next.mu;
    in.nu[i] = next.nu;
  }
  uint64_t more = whole < n ? finish_apart<kDecay, kNesterov>(h, kGrad, in, whole, n - whole) : 0;
  for (; left != 0; left &= left - 1) {
    more += finish_apart<kDecay, kNesterov>(h, kGrad, in, __builtin_ctzll(left) * kPair, kPair);
  }
  return sum_params<Form::kNumbers>(in.next, DType::kBF16, 0, n) + more;
}
static_assert(kBlock / kPair <= 64, "left has a bit for each pair");

template <bool kDecay, bool kNesterov>
uint64_t adam_bf16(DType grad, const AdamFactors& h, const Bf16Operands& in, int n) {
  return grad == DType::kF32 ? adam_bf16<kDecay, kNesterov, DType::kF32, f32u>(h, in, n)
                             : adam_bf16<kDecay, kNesterov, DType::kBF16, u16u>(h, in, n);
}

uint64_t apply_adam_bf16(const RuleSpec& spec, DType grad, bool decay, const AdamFactors& h,
                         const Bf16Operands& in, int n) {
  if (spec.nesterov) {
    return decay ? adam_bf16<true, true>(grad, h, in, n) : adam_bf16<false, true>(grad, h, in, n);
  }
  return decay ? adam_bf16<true, false>(grad, h, in, n) : adam_bf16<false, false>(grad, h, in, n);
}
