// The rules over one block of widened operands.
//
// What always holds: a moment may be updated in place (mu_out == mu). Included by run.inl only, inside
// namespace jmo::kernels::JMO_ISA. Thread contract: pure functions.

struct Operands {
  const f32u* grad;
  const f32u* mu;
  const f32u* nu;
  const f32u* master;  // read with decay only
  f32u* mu_out;
  f32u* nu_out;
  float* update;
};

// Of what is divided by a correction: the smallest of each lane, for are_dividends, and the test that lets
// zeros pass.
template <bool kNesterov>
JMO_INLINE VFloat smallest_dividend(const Moments<VFloat>& next, VFloat g) {
  const VFloat least = smaller(next.mu, next.nu);
  return kNesterov ? smaller(least, g) : least;
}
template <bool kNesterov>
JMO_INLINE bool has_dividends(const Moments<VFloat>& next, VFloat g) {
  return has_dividends(next.mu) && has_dividends(next.nu) && (!kNesterov || has_dividends(g));
}

// Elements [from, n), with true divisions. kMoved: the moments have been updated, but may hold NaNs of any
// kind.
template <bool kDecay, bool kNesterov, bool kMoved = false>
void adam_divided(const AdamFactors& factors, const Operands& in, int from, int n) {
  const AdamFactors h = factors;
  const f32u *grad = in.grad, *mu = in.mu, *nu = in.nu, *master = in.master;
  f32u *mu_out = in.mu_out, *nu_out = in.nu_out;
  float* update = in.update;
  JMO_LOOP
  for (int i = from; i < n; ++i) {
    const float g = grad[i];
    const Moments<float> next = kMoved ? Moments<float>{mu[i], nu[i]} : moved<float>(h, g, mu[i], nu[i]);
    mu_out[i] = canonical(next.mu);
    nu_out[i] = canonical(next.nu);
    update[i] =
        canonical(update_of<kDecay>(h, corrected_mu<kNesterov>(h, g, next.mu), corrected_root(h, next.nu),
                                    kDecay ? static_cast<float>(master[i]) : 0.0f));
  }
}

template <bool kDecay, bool kNesterov>
void adam(const AdamFactors& factors, const Operands& operands, int n) {
  const AdamFactors h = factors;
  const Operands in = operands;
  const VUint large = large_bits();
  int i = 0;
  for (; kMultiplies && h.divides && i + kLanes <= n; i += kLanes) {
    const VFloat g = load(in.grad + i);
    const Moments<VFloat> next = moved(h, g, load(in.mu + i), load(in.nu + i));
    const VFloat mu_hat = corrected_mu<kNesterov>(h, g, next.mu), nu_root = corrected_root(h, next.nu);
    const VFloat update = update_of<kDecay>(h, mu_hat, nu_root, kDecay ? load(in.master + i) : VFloat{});
    const Lanes dividends = are_dividends(smallest_dividend<kNesterov>(next, g), large);
    // A NaN among the moments makes one of the update.
    if (__builtin_expect(
            all(both_numbers(update, update)) && (all(dividends) || has_dividends<kNesterov>(next, g)),
            true)) {
      store(in.mu_out + i, next.mu);
      store(in.nu_out + i, next.nu);
      store(in.update + i, update);
    } else {
      adam_divided<kDecay, kNesterov>(h, in, i, i + kLanes);
    }
  }
  adam_divided<kDecay, kNesterov>(h, in, i, n);
}

void apply_adam(const RuleSpec& spec, bool decay, const AdamFactors& h, const Operands& in, int n) {
  if (spec.nesterov) {
    decay ? adam<true, true>(h, in, n) : adam<false, true>(h, in, n);
  } else {
    decay ? adam<true, false>(h, in, n) : adam<false, false>(h, in, n);
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
    const float trace = traced<float>(momentum, g, mu_in[i]);
    const float u = kNesterov ? traced(momentum, g, trace) : trace;
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

void apply_sgd(const RuleSpec& spec, const float* hyper, const Operands& in, int n) {
  if (!spec.has_mu) {
    sgd_plain(hyper, in, n);
  } else if (spec.nesterov) {
    sgd_momentum<true>(hyper, in, n);
  } else {
    sgd_momentum<false>(hyper, in, n);
  }
}
