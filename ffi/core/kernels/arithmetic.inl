// The arithmetic of the rules, exactly as optax 0.2.8 does it under jit: these operations in this order, each
// rounded to f32.
//
// What always holds: Float is float, a vector of floats (vector.inl) or a device's float
// (ffi/device/cell_update.inl), for which quotient and root are declared before; the moments that go into an
// update are those before any rounding to their storage type. Included by run.inl and cell_update.inl only,
// inside their namespaces. Thread contract: pure functions.

// The hyperparameters of Adam, in registers for the length of a loop.
struct AdamFactors {
  float neg_lr, decay, b1, one_minus_b1, b1_param, b2, one_minus_b2, eps, eps_root;
  Divisor correction1, correction2, next_correction1;
  bool divides;  // whether divide.inl can divide by the corrections that are used
};

JMO_INLINE AdamFactors adam_factors(const float* hyper, bool nesterov) {
  const float c1 = hyper[kBiasCorrection1], c2 = hyper[kBiasCorrection2];
  const float c3 = nesterov ? hyper[kNextBiasCorrection1] : c1;
  return {hyper[kNegLr],
          hyper[kWeightDecay],
          hyper[kB1],
          hyper[kOneMinusB1],
          hyper[kB1Param],
          hyper[kB2],
          hyper[kOneMinusB2],
          hyper[kEps],
          hyper[kEpsRoot],
          {c1, 1.0f / c1},
          {c2, 1.0f / c2},
          {c3, 1.0f / c3},
          is_divisor(c1) && is_divisor(c2) && is_divisor(c3)};
}

// optax.scale_by_adam, add_decayed_weights, scale_by_learning_rate, in four steps.
template <typename Float>
struct Moments {
  Float mu, nu;
};
template <typename Float>
JMO_INLINE Moments<Float> moved(const AdamFactors& h, Float g, Float mu, Float nu) {
  return {h.one_minus_b1 * g + h.b1 * mu, h.one_minus_b2 * (g * g) + h.b2 * nu};
}
template <bool kNesterov, typename Float>
JMO_INLINE Float corrected_mu(const AdamFactors& h, Float g, Float mu) {
  if constexpr (!kNesterov) return quotient(mu, h.correction1);
  return h.b1_param * quotient(mu, h.next_correction1) + h.one_minus_b1 * quotient(g, h.correction1);
}
template <typename Float>
JMO_INLINE Float corrected_root(const AdamFactors& h, Float nu) {
  return root(quotient(nu, h.correction2) + h.eps_root);
}
template <bool kDecay, typename Float>
JMO_INLINE Float update_of(const AdamFactors& h, Float mu_hat, Float nu_root, Float master) {
  Float u = mu_hat / (nu_root + h.eps);
  if constexpr (kDecay) u = u + h.decay * master;
  return h.neg_lr * u;
}

// optax.trace; once more over its own result with Nesterov.
template <typename Float>
JMO_INLINE Float traced(float momentum, Float g, Float mu) {
  return g + momentum * mu;
}
