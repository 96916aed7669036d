// The arithmetic of the rules over one block of widened operands, exactly as optax 0.2.8 does it under jit:
// these operations in this order, each rounded to f32.
//
// What always holds: a moment may be updated in place (mu_out == mu); the moments that go into `update` are
// those before any rounding to their storage type. Included by run.inl only, inside namespace
// jmo::kernels::JMO_ISA. Thread contract: pure functions.

struct Operands {
  const f32u* grad;
  const f32u* mu;
  const f32u* nu;
  const f32u* master;  // read with decay only
  f32u* mu_out;
  f32u* nu_out;
  float* update;
};

// The hyperparameters of Adam, in registers for the length of a loop.
struct AdamFactors {
  float neg_lr, decay, b1, one_minus_b1, b1_param, b2, one_minus_b2, eps, eps_root, correction1, correction2,
      next_correction1;
};

JMO_INLINE AdamFactors adam_factors(const float* hyper) {
  return {hyper[kNegLr],
          hyper[kWeightDecay],
          hyper[kB1],
          hyper[kOneMinusB1],
          hyper[kB1Param],
          hyper[kB2],
          hyper[kOneMinusB2],
          hyper[kEps],
          hyper[kEpsRoot],
          hyper[kBiasCorrection1],
          hyper[kBiasCorrection2],
          hyper[kNextBiasCorrection1]};
}

template <typename Float>
struct AdamElement {
  Float mu, nu, update;
};

// optax.scale_by_adam, add_decayed_weights, scale_by_learning_rate.
template <bool kDecay, bool kNesterov, typename Float>
JMO_INLINE AdamElement<Float> adam_element(const AdamFactors& h, Float g, Float old_mu, Float old_nu,
                                           Float master) {
  const Float mu = h.one_minus_b1 * g + h.b1 * old_mu;
  const Float nu = h.one_minus_b2 * (g * g) + h.b2 * old_nu;
  Float mu_hat;
  if constexpr (kNesterov) {
    mu_hat = h.b1_param * (mu / h.next_correction1) + h.one_minus_b1 * (g / h.correction1);
  } else {
    mu_hat = mu / h.correction1;
  }
  const Float nu_hat = nu / h.correction2;
  Float u = mu_hat / (root(nu_hat + h.eps_root) + h.eps);
  if constexpr (kDecay) u = u + h.decay * master;
  return {canonical(mu), canonical(nu), h.neg_lr * u};
}

template <bool kDecay, bool kNesterov>
void adam(const float* hyper, const Operands& in, int n) {
  const AdamFactors h = adam_factors(hyper);
  const f32u *grad = in.grad, *mu = in.mu, *nu = in.nu, *master = in.master;
  f32u *mu_out = in.mu_out, *nu_out = in.nu_out;
  float* update = in.update;
  JMO_LOOP
  for (int i = 0; i < n; ++i) {
    const AdamElement next = adam_element<kDecay, kNesterov>(h, grad[i], mu[i], nu[i],
                                                             kDecay ? static_cast<float>(master[i]) : 0.0f);
    mu_out[i] = next.mu;
    nu_out[i] = next.nu;
    update[i] = canonical(next.update);
  }
}

// The most frequent case, bf16 params with f32 moments, in one loop. An element's chain of dependent
// operations is so long that the processor cannot look far enough ahead to overlap several: so the moments
// and the update of vector i are formed beside the split master of vector i - kLag, whose operations fill the
// time that the divider needs. The same bits as the separate steps give.
constexpr int kLag = 4 * kLanes;

struct Bf16Operands {
  const char* grad;
  const u16u* param;
  f32u* mu;
  f32u* nu;
  u16u* remainder;
  f32u* master;  // between the two halves
  f32u* update;
  uint16_t* next;
  uint16_t* stored;
};

JMO_INLINE float widened_grad(float g) { return g; }
JMO_INLINE VFloat widened_grad(VFloat g) { return g; }
JMO_INLINE float widened_grad(uint32_t g) { return as_float(g << 16); }
JMO_INLINE VFloat widened_grad(VUint g) { return as_float(g << 16); }

// First half: one vector, or one element. Grad: Float, or Bits for bf16.
template <bool kDecay, bool kNesterov, typename Float, typename Bits, typename Grad, typename GradAt>
JMO_INLINE void move_bf16(const AdamFactors& h, const Bf16Operands& in, const GradAt* grad_at, int i) {
  Grad grad;
  Float mu, nu;
  Bits param, remainder;
  load(grad_at + i, grad);
  load(in.mu + i, mu);
  load(in.nu + i, nu);
  load(in.param + i, param);
  load_signed(in.remainder + i, remainder);
  const Float master = joined_master<Float>(param, remainder);
  const AdamElement<Float> moved = adam_element<kDecay, kNesterov>(h, widened_grad(grad), mu, nu, master);
  store(in.mu + i, moved.mu);
  store(in.nu + i, moved.nu);
  store(in.master + i, master);
  store(in.update + i, moved.update);
}

// Second half.
template <typename Float, typename Bits>
JMO_INLINE void split_bf16(const Bf16Operands& in, int i) {
  Bits param;
  Float master, update;
  load(in.param + i, param);
  load(in.master + i, master);
  load(in.update + i, update);
  Bf16Element<Bits> result;
  if (__builtin_expect(!finished_bf16_exactly(param, master, update, result), false)) {
    result = finished_bf16(param, master, update);
  }
  store(in.next + i, result.next);
  store(in.stored + i, result.stored);
  store(in.remainder + i, result.remainder);
}

template <bool kDecay, bool kNesterov, typename GradAt, typename Grad, typename VGrad>
void adam_bf16(const float* hyper, const Bf16Operands& in, int n) {
  const AdamFactors h = adam_factors(hyper);
  const GradAt* grad = reinterpret_cast<const GradAt*>(in.grad);
  const int whole = n - n % kLanes;
  int moved = 0;
  int split = 0;
  for (; moved < kLag && moved < whole; moved += kLanes) {
    move_bf16<kDecay, kNesterov, VFloat, VUint, VGrad>(h, in, grad, moved);
  }
  for (; moved < whole; moved += kLanes, split += kLanes) {
    move_bf16<kDecay, kNesterov, VFloat, VUint, VGrad>(h, in, grad, moved);
    split_bf16<VFloat, VUint>(in, split);
  }
  for (; split < whole; split += kLanes) split_bf16<VFloat, VUint>(in, split);
  for (; split < n; ++split) {
    move_bf16<kDecay, kNesterov, float, uint32_t, Grad>(h, in, grad, split);
    split_bf16<float, uint32_t>(in, split);
  }
}

template <bool kDecay, bool kNesterov>
void adam_bf16(DType grad, const float* hyper, const Bf16Operands& in, int n) {
  if (grad == DType::kF32) {
    adam_bf16<kDecay, kNesterov, f32u, float, VFloat>(hyper, in, n);
  } else {
    adam_bf16<kDecay, kNesterov, u16u, uint32_t, VUint>(hyper, in, n);
  }
}

void apply_adam_bf16(const RuleSpec& spec, DType grad, bool decay, const float* hyper, const Bf16Operands& in,
                     int n) {
  if (spec.nesterov) {
    decay ? adam_bf16<true, true>(grad, hyper, in, n) : adam_bf16<false, true>(grad, hyper, in, n);
  } else {
    decay ? adam_bf16<true, false>(grad, hyper, in, n) : adam_bf16<false, false>(grad, hyper, in, n);
  }
}

// optax.trace, scale_by_learning_rate.
template <bool kNesterov>
void sgd_momentum(const float* hyper, const Operands& in, int n) {
  const float neg_lr = hyper[kSgdNegLr], momentum = hyper[kMomentum];
  const f32u *grad = in.grad, *mu_in = in.mu;
  f32u* mu_out = in.mu_out;
  float* update = in.update;
  JMO_LOOP
  for (int i = 0; i < n; ++i) {
    const float g = grad[i];
    const float trace = g + momentum * mu_in[i];
    const float u = kNesterov ? g + momentum * trace : trace;
    mu_out[i] = canonical(trace);
    update[i] = canonical(neg_lr * u);
  }
}

void sgd_plain(const float* hyper, const Operands& in, int n) {
  const float neg_lr = hyper[kSgdNegLr];
  const f32u* grad = in.grad;
  float* update = in.update;
  JMO_LOOP
  for (int i = 0; i < n; ++i) update[i] = canonical(neg_lr * grad[i]);
}

void apply_rule(const RuleSpec& spec, bool decay, const float* hyper, const Operands& in, int n) {
  if (spec.rule == Rule::kSgd) {
    if (!spec.has_mu) {
      sgd_plain(hyper, in, n);
    } else if (spec.nesterov) {
      sgd_momentum<true>(hyper, in, n);
    } else {
      sgd_momentum<false>(hyper, in, n);
    }
  } else if (spec.nesterov) {
    decay ? adam<true, true>(hyper, in, n) : adam<false, true>(hyper, in, n);
  } else {
    decay ? adam<true, false>(hyper, in, n) : adam<false, false>(hyper, in, n);
  }
}
