"""Latent variables learned beside the weights: gates, slab precisions, the likelihood's noise, the multiplier.

They follow the plain gradient of the objective (equation 12's min-max read as empirical Bayes): the priors' and the
noise's in closed form, the loss's in the gates and the budget's by a backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dllp.config import SPIKE_AND_SLAB, Config, Counted
from dllp.devices.mesh import Place
from dllp.errors import DllpError, NumericsError
from dllp.method import gates, spike_and_slab
from dllp.method.other_priors import POLARIZATION, PRIORS, Prior
from dllp.records import GATE_BINS
from dllp.training.gating import ChannelGating, WeightGating

UNEQUAL = 1e-3
"""Standard deviation of the noise on the first logits of gates with a threshold: less than a step of Adam."""
THRESHOLD_STEPS = 24
"""Bisections for the threshold of the logits: to 1e-6 of their range."""
LR_SCALES = 0.01
"""Adam's rate for slab precisions and noise."""


class Latents:
    """Gate logits, slab precisions, noise and multipliers of n particles with U gates in L modules.

    Args:
        gating: The units that gates open and close; None in a dense run.
        config: A resolved configuration.
        rows: (n, P) particles, for shape, device and dtype.
        num_data: N, the labels of the training set, or the numbers that a regression observes.
        place: Which of all particles these are.
    """

    def __init__(
        self, gating: ChannelGating | WeightGating | None, config: Config, rows: Tensor, num_data: int, place: Place
    ) -> None:
        self.gating, self.config, self.place = gating, config, place
        units, modules = (gating.units, len(gating.scales.modules)) if gating else (0, 0)
        n, device = len(rows), rows.device
        self.logits = rows.new_full((n, units), gates.INITIAL_LOGIT)
        self.log_slab = rows.new_full((n, modules), config.slab).log()
        self.log_d = rows.new_zeros(n)
        self.multiplier = rows.new_zeros(n)
        self.gap = rows.new_zeros(n)
        self.threshold = rows.new_zeros(n, 1)  # logits above it are open
        self.ran = rows.new_ones(n)  # cost of the gates that the last step ran with, where there is a threshold
        self.keep: Tensor | None = None  # (n, U) bool, once the gates are discrete
        self.d_logits, self.d_slab, self.d_noise = (torch.zeros_like(t) for t in self.learned)
        self.log_slab.grad, self.log_d.grad = self.d_slab, self.d_noise  # the logits' comes when they start to learn
        rates = (config.lr_gates, LR_SCALES, LR_SCALES)
        groups = [{"params": [value], "lr": lr} for value, lr in zip(self.learned, rates, strict=True)]
        self.adam = torch.optim.Adam(groups, capturable=device.type == "cuda")
        self.generator = torch.Generator(device).manual_seed(config.seed)
        self.budget: Counted
        self.budget, self.target = config.budget
        if self.ranked:
            # From 0, above which the budget's energy counts: from higher up its multiplier would grow for as long as no
            # gate is below, and all gates would sink together, whatever their use. Equal gates would shut together.
            own = torch.Generator().manual_seed(config.seed)
            noise = torch.randn(place.particles, units, generator=own, dtype=rows.dtype)
            self.logits.copy_(UNEQUAL * place.take(noise))
        # Time never falls to nothing, as FLOPs do: the price of what can be saved of it would be as many times lower.
        shut = torch.zeros_like(self.logits[0])
        self.span = 1 - self._fraction(shut).item() if self.budget == "latency" else 1.0
        self.spike = float(config.epsilon or 0)
        self.other = None if config.prior == SPIKE_AND_SLAB else replaced_prior(config)
        self.strength = 1 / num_data  # Bayes' own; the prior's weight is beta
        # the prior pushes a gate by beta / N, the budget by about 1 / U: it must be able to hold against it
        self.leverage = max(1.0, config.beta * self.strength * units)

    @property
    def _gating(self) -> ChannelGating | WeightGating:
        if self.gating is None:
            raise DllpError("there are no gates in a dense run")
        return self.gating

    @property
    def learned(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors that Adam changes: gate logits, and the logarithms of slab precisions and noise."""
        return self.logits, self.log_slab, self.log_d

    @property
    def ranked(self) -> bool:
        """True where the budget is a threshold on the gates' logits, and False where it is an energy alone.

        Gates that are not drawn have one: the networks run with as many open gates as the budget counts, at every
        step, and the decision changes nothing. An energy would be met by fractions of gates, which the decision opens.
        """
        return self.gating is not None and self.target is not None and not self.config.draw_gates

    def relaxed(self, temperature: Tensor, ramp: Tensor) -> Tensor:
        """(n, U) relaxed gates: medians, or with noise that every process draws for all particles."""
        self.set_threshold(ramp)
        if self.ranked:
            z = gates.discretise(self.logits - self.threshold).to(self.logits.dtype)
            self.ran.copy_(self._fraction(z))
            return z
        if not self.config.draw_gates:
            return gates.median(self.logits, temperature)
        shape, device, dtype = (self.place.particles, self.logits.shape[1]), self.logits.device, self.logits.dtype
        noise = torch.rand(shape, generator=self.generator, device=device, dtype=dtype)
        return gates.sample(self.logits, temperature, self.place.take(noise))

    def set_threshold(self, ramp: Tensor | float) -> None:
        """Find the least logit such that the gates above it cost no more than the ramp allows."""
        if not self.ranked or self.target is None:
            return
        low, high = self.logits.amin(1, keepdim=True) - 1, self.logits.amax(1, keepdim=True)
        for _ in range(THRESHOLD_STEPS):
            middle = (low + high) / 2
            fits = self._fraction((self.logits > middle).to(self.logits.dtype))[:, None] <= ramp
            low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
        self.threshold.copy_(high)

    def _annealed(self, temperature: Tensor) -> Tensor:
        """(n, U): logits of theta in equation 10; of medians it is annealed as they are."""
        return self.logits if self.config.draw_gates else (self.logits - self.threshold) / temperature

    def prior_pulls(self, sizes: Tensor, z: Tensor, temperature: Tensor, *, soft: bool) -> tuple[Tensor, Tensor]:
        """(n, U) scales -> the pull of slab and spike on their coordinates, (n, U) each. Sets the slab's gradient.

        While gates are open for sure there is no spike. Where a gate z is open or shut it says itself which of both a
        weight belongs to, theta = z in equation 10: open weights of any size, also 0, are under the slab alone.
        Other priors are of the sizes |scale|, which a single coordinate's root mean square is, too.
        """
        scales = self._gating.scales
        if self.other is not None:
            prior, parameters = self.other
            scores = prior.unit_scores(sizes, scales.lengths, *parameters)
            pull = self.strength * scales.pulls(sizes, scores)
            return pull, torch.zeros_like(pull)
        sure = self.ranked or not soft
        logits = torch.where(z > 0.5, torch.inf, -torch.inf) if sure else self._annealed(temperature)
        terms = self._prior_terms(sizes, logits)
        slab_gradient = scales.module_sums(spike_and_slab.log_slab_score(*terms))
        self.d_slab.copy_(slab_gradient).mul_(-self.config.beta * self.strength)
        slab, spike = spike_and_slab.precision_parts(*terms)
        return self.strength * slab / scales.count, self.strength * spike / scales.count

    def _prior_terms(self, sizes: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
        """Arguments of equation 10 at each unit: scales (n, U), gate logits (n, U), slab (n, U), spike precision."""
        return sizes, logits, self._gating.scales.spread(self.log_slab).exp(), self.spike

    def shrinkage(self, rows: Tensor) -> Tensor:
        """(P,) bool, where weight decay acts: not on what the prior shrinks until gates are discrete (Section 2)."""
        decayed = torch.ones_like(rows[0], dtype=torch.bool)
        if self.gating is not None and self.keep is None:
            decayed[self.gating.scales.at] = False
        return decayed

    def gate_gradient(self, sizes: Tensor, z: Tensor, through: Tensor, temperature: Tensor, ramp: Tensor) -> None:
        """Set the logits' gradient from the loss's gradient in the gates z (n, U), the prior and the budget.

        Through gates that are open or shut the gradient passes straight, as if they were medians.
        """
        self.logits.grad = self.d_logits
        logits, slope = self._annealed(temperature), 1 / temperature
        if not self.config.draw_gates:
            z = logits.sigmoid()
        prior = torch.zeros_like(z)
        if self.other is None:
            prior = spike_and_slab.gate_score(*self._prior_terms(sizes, logits))
            prior = prior if self.config.draw_gates else prior * slope
        energy = self._budget_gradient(temperature, ramp)
        self.d_logits.copy_(through * z * (1 - z) * slope - self.config.beta * self.strength * prior + energy)
        if self.target is not None:
            self.multiplier.add_(self.gap, alpha=gates.DUAL_STEP[self.config.granularity] * self.leverage)
            if self.ranked:  # the threshold holds the budget; a negative price would favour what costs most
                self.multiplier.clamp_(min=0)

    def _budget_gradient(self, temperature: Tensor, ramp: Tensor) -> Tensor:
        """(n, U): gradient of the budget's energy in the logits; leaves the gap behind for the dual ascent."""
        with torch.enable_grad():
            logits = self.logits.detach().requires_grad_()
            counted = logits.sigmoid() if self.config.draw_gates else gates.median(logits - self.threshold, temperature)
            if self.ranked:
                counted = counted + (gates.discretise(logits).to(counted.dtype) - counted).detach()
            fraction = self._fraction(counted)
            penalty = gates.GAP_PENALTY[self.config.granularity] * self.leverage
            if self.target is None:
                energy = (self.config.sparsity or 0.0) * fraction
            else:
                energy, gap = gates.budget_energy(fraction / self.span, ramp / self.span, self.multiplier, penalty)
                self.gap.copy_(gap.detach())
            (gradient,) = torch.autograd.grad(energy.sum(), logits)
        return gradient

    def _fraction(self, theta: Tensor) -> Tensor:
        cost = getattr(self._gating, self.budget)
        return cost.expected(theta) / cost.dense

    def update(self, healthy: Tensor) -> None:
        """One step of Adam, without gradients where a number broke; the slab stays within its bounds."""
        for gradient in (self.d_logits, self.d_slab, self.d_noise):
            gradient.masked_fill_(~healthy, 0)
        self.adam.step()
        if self.config.slab_bounds is not None:
            self.log_slab.copy_(spike_and_slab.clamp_slab(self.log_slab, self.config.slab_bounds))

    def decide(self) -> Tensor:
        """bool (n, U): the gates that stay, such that the true cost meets the budget."""
        if not bool(self.logits.isfinite().all()):
            raise NumericsError(f"the gates are not finite: training diverged; lower lr (now {self.config.lr})")
        return torch.stack([self._gating.decide(row, self.budget, self.target) for row in self.logits])

    def log_prior(self, rows: Tensor) -> Tensor:
        """(n, P) -> (n,): log density of all gated scales, equation 10 or the prior in its place, in float64."""
        scales = self._gating.scales
        values = scales.of(rows).double()
        if self.other is None:
            slab = scales.spread(self.log_slab).exp().double()
            logits = (self.logits - self.threshold).double()
            return spike_and_slab.log_prob(values, logits, slab, self.spike).sum(1)
        prior, parameters = self.other
        values = values.abs()
        parts = values.split(list(scales.lengths), dim=1) if prior.scope == "module" else [values]
        sums = [torch.stack([prior.log_prob(row, *parameters).sum() for row in part]) for part in parts]
        return torch.stack(sums).sum(0)

    def rest(self, keep: Tensor) -> None:
        """Hold the decisions (n, U): from here on only the noise learns."""
        self.logits.grad = self.log_slab.grad = None
        self.keep = keep
        self.set_threshold(self.target or 1.0)

    @property
    def theta(self) -> Tensor:
        """(n, U): probabilities of the gates, 0 or 1 once they are discrete."""
        return (self.logits - self.threshold).sigmoid() if self.keep is None else self.keep.to(self.logits.dtype)

    def cost(self) -> Tensor:
        """(n,) expected (soft) or true (discrete) cost over the dense cost; of a threshold that of the open gates."""
        if self.gating is None:
            return torch.ones_like(self.log_d)
        return self.ran if self.ranked and self.keep is None else self._fraction(self.theta)

    def undecided(self) -> Tensor:
        """(n,) share of gates whose probability is neither below 5% nor above 95%."""
        if self.gating is None or self.keep is not None:
            return torch.zeros_like(self.log_d)
        return gates.undecided(self.theta)

    def counts(self) -> list[list[int]]:
        """(modules, GATE_BINS): gates of each module by their probability, all particles together."""
        if self.gating is None:
            return []
        theta = self.theta
        # sums of booleans are whole numbers and deterministic; a histogram on CUDA is not
        parts = [self.gating.scales.module_sums(theta < (k + 1) / GATE_BINS).sum(0) for k in range(GATE_BINS - 1)]
        total = self.gating.scales.module_sums(torch.ones_like(theta, dtype=torch.bool)).sum(0)
        sums = self.place.rows.all_reduce_(torch.stack([*parts, total]))
        return sums.diff(dim=0, prepend=torch.zeros_like(total)[None]).T.tolist()

    def noise(self) -> Tensor:
        """(n,) variance 1/d^2 of the likelihood."""
        return (-2 * self.log_d).exp()


def replaced_prior(config: Config) -> tuple[Prior, tuple[float, ...]]:
    """The prior in spike-and-slab's place, and its parameters: Section 3.1 as one line of configuration."""
    prior, width = PRIORS[config.prior], config.prior_scale
    parameters = {"polarization": (POLARIZATION, width), "hoyer": (1 / width,)}.get(prior.name, (width,))
    return prior, parameters
