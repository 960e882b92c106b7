"""Generators: adversarial, diffusion, quantised codes, flows, energy."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from user_programs import Values, Wrap, program, trained


@program()
def gan_with_gradient_penalty(compiled: Wrap) -> Values:
    generator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 6))
    critic = nn.Sequential(nn.Linear(6, 16), nn.Softplus(), nn.Linear(16, 1))
    of_generator = torch.optim.Adam(generator.parameters(), 1e-2, betas=(0.0, 0.9))
    of_critic = torch.optim.Adam(critic.parameters(), 1e-2, betas=(0.0, 0.9))
    make, judge, losses = compiled(generator), compiled(critic), []
    for step in range(4):
        real = torch.randn(8, 6) + 2
        fake = make(torch.randn(8, 4)).detach()
        share = torch.rand(8, 1)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
        loss = judge(fake).mean() - judge(real).mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()
        of_critic.zero_grad(set_to_none=step % 2 == 0)
        loss.backward()
        of_critic.step()
        losses.append(loss.item())
        if step % 2:
            of_generator.zero_grad()
            (-judge(make(torch.randn(8, 4))).mean()).backward()
            of_generator.step()
    return losses, trained(generator), trained(critic)


@program()
def gan_with_spectral_norms(compiled: Wrap) -> Values:
    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = spectral_norm(nn.Conv2d(1, 4, 3, 2, 1))
            self.second = spectral_norm(nn.Linear(4 * 16, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(F.leaky_relu(self.first(x), 0.1).flatten(1)).squeeze(-1)

    critic = Critic()
    judge, optimizer = compiled(critic), torch.optim.RMSprop(critic.parameters(), 1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        real, fake = torch.rand(4, 1, 8, 8), torch.rand(4, 1, 8, 8) - 0.5
        (F.relu(1 - judge(real)) + F.relu(1 + judge(fake))).mean().backward()
        optimizer.step()
    critic.eval()
    with torch.no_grad():
        return trained(critic, judge(torch.ones(2, 1, 8, 8)))


class Denoiser(nn.Module):
    """A net of a noisy picture and the time."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(channels, channels), nn.SiLU(), nn.Linear(channels, channels))
        self.down, self.up = nn.Conv2d(1, channels, 3, 2, 1), nn.ConvTranspose2d(channels, 1, 4, 2, 1)
        self.norm, self.channels = nn.GroupNorm(2, channels), channels

    def embed(self, t: torch.Tensor) -> torch.Tensor:
        half = self.channels // 2
        rates = torch.exp(-math.log(10_000) * torch.arange(half, device=t.device) / half)
        angles = t[:, None] * rates[None]
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        hidden = self.down(x)
        return self.up(F.silu(self.norm(hidden) + self.time(self.embed(t))[:, :, None, None]))


@program()
def diffusion_trained_and_sampled(compiled: Wrap) -> Values:
    steps = 12
    betas = torch.linspace(1e-3, 0.2, steps)
    kept = torch.cumprod(1 - betas, 0)
    model = Denoiser()
    average = copy.deepcopy(model).requires_grad_(False)
    net, optimizer = compiled(model), torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(3):
        clean, t, noise = torch.randn(4, 1, 8, 8), torch.randint(0, steps, (4,)), torch.randn(4, 1, 8, 8)
        share = kept[t].view(-1, 1, 1, 1)
        loss = F.mse_loss(net(share.sqrt() * clean + (1 - share).sqrt() * noise, t), noise)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for a, b in zip(average.parameters(), model.parameters(), strict=True):
            a.lerp_(b, 0.1)
    drawn, net = torch.randn(2, 1, 8, 8), compiled(average)
    with torch.inference_mode():
        for step in reversed(range(steps)):
            t = torch.full((2,), step, dtype=torch.long)
            mean = (drawn - betas[step] / (1 - kept[step]).sqrt() * net(drawn, t)) / (1 - betas[step]).sqrt()
            drawn = mean + (betas[step].sqrt() * torch.randn_like(drawn) if step else 0)
    return drawn.clone(), trained(model), trained(average)


class Codes(nn.Module):
    """A codebook that follows what is assigned to it."""

    def __init__(self, count: int, width: int, decay: float = 0.9) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("codes", torch.randn(count, width))
        self.register_buffer("used", torch.ones(count))
        self.register_buffer("sums", self.codes.clone())  # type: ignore[arg-type]

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        flat = z.reshape(-1, z.shape[-1])
        distances = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codes.t() + self.codes.pow(2).sum(1)
        nearest = distances.argmin(1)
        chosen = F.embedding(nearest, self.codes).view_as(z)
        if self.training:
            with torch.no_grad():
                one_hot = F.one_hot(nearest, self.codes.shape[0]).type_as(z)
                self.used.mul_(self.decay).add_(one_hot.sum(0), alpha=1 - self.decay)
                self.sums.mul_(self.decay).add_(one_hot.t() @ flat, alpha=1 - self.decay)
                total = self.used.sum()
                share = (self.used + 1e-5) / (total + 1e-5 * self.used.numel()) * total
                self.codes.copy_(self.sums / share.unsqueeze(1))
        return z + (chosen - z).detach(), F.mse_loss(z, chosen.detach()), nearest.view(z.shape[:-1])


@program()
def quantised_codes_that_follow(compiled: Wrap) -> Values:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.codes, self.decode = nn.Linear(6, 4), Codes(10, 4), nn.Linear(4, 6)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            quantised, commitment, codes = self.codes(self.encode(x))
            return {"x": self.decode(quantised), "commitment": commitment, "codes": codes}

    model = Model()
    net, optimizer, seen = compiled(model), torch.optim.Adam(model.parameters(), 1e-2), []
    for _ in range(4):
        x = torch.randn(5, 3, 6)
        out = net(x)
        optimizer.zero_grad()
        (F.mse_loss(out["x"], x) + 0.25 * out["commitment"]).backward()
        optimizer.step()
        seen.append(out["codes"].unique().tolist())
    model.eval()
    return seen, trained(model, net(torch.randn(2, 3, 6)))


@program()
def flow_of_couplings(compiled: Wrap) -> Values:
    class Coupling(nn.Module):
        def __init__(self, width: int, flip: bool) -> None:
            super().__init__()
            self.flip = flip
            self.net = nn.Sequential(nn.Linear(width // 2, 12), nn.Tanh(), nn.Linear(12, width))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = x.chunk(2, dim=-1)
            if self.flip:
                a, b = b, a
            scale, shift = self.net(a).chunk(2, dim=-1)
            scale = torch.tanh(scale)
            b = b * scale.exp() + shift
            return torch.cat([b, a] if self.flip else [a, b], dim=-1), scale.sum(-1)

        def inverse(self, y: torch.Tensor) -> torch.Tensor:
            a, b = y.chunk(2, dim=-1)
            if self.flip:
                a, b = b, a
            scale, shift = self.net(a).chunk(2, dim=-1)
            b = (b - shift) * (-torch.tanh(scale)).exp()
            return torch.cat([b, a] if self.flip else [a, b], dim=-1)

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Coupling(4, flip=n % 2 == 1) for n in range(4))
            self.mixing = nn.Parameter(torch.linalg.qr(torch.randn(4, 4))[0])

        def log_prob(self, x: torch.Tensor) -> torch.Tensor:
            total = torch.linalg.slogdet(self.mixing).logabsdet.expand(x.shape[0])
            x = x @ self.mixing
            for layer in self.layers:
                x, volume = layer(x)
                total = total + volume
            prior = torch.distributions.Independent(
                torch.distributions.Normal(torch.zeros(4), torch.ones(4), validate_args=False), 1
            )
            return prior.log_prob(x) + total

        @torch.no_grad()
        def sample(self, count: int) -> torch.Tensor:
            y = torch.randn(count, 4)
            for layer in reversed(self.layers):
                y = layer.inverse(y)
            return torch.linalg.solve(self.mixing, y, left=False)

    flow = Flow()
    log_prob, sample = compiled(flow.log_prob), compiled(flow.sample)
    optimizer = torch.optim.SGD(flow.parameters(), 1e-2, momentum=0.9, nesterov=True)
    for _ in range(3):
        optimizer.zero_grad()
        (-log_prob(torch.randn(6, 4) * 2 + 1).mean()).backward()
        optimizer.step()
    return trained(flow, sample(3))


@program()
def energy_sampled_by_langevin(compiled: Wrap) -> Values:
    energy = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 1))
    of = compiled(energy)
    optimizer = torch.optim.Adagrad(energy.parameters(), 1e-2)

    def sampled(x: torch.Tensor, steps: int) -> torch.Tensor:
        for p in energy.parameters():
            p.requires_grad_(False)
        for _ in range(steps):
            x = x.detach().requires_grad_()
            of(x).sum().backward()
            assert x.grad is not None
            x = x - 0.1 * x.grad.clamp(-1, 1) + 0.01 * torch.randn_like(x)
        for p in energy.parameters():
            p.requires_grad_(True)
        return x.detach()

    pool = torch.randn(8, 3)
    for _ in range(3):
        pool = sampled(pool, 3)
        optimizer.zero_grad()
        data = torch.randn(8, 3) + 1
        (of(data).mean() - of(pool).mean() + 0.1 * (of(data) ** 2).mean()).backward()
        optimizer.step()
    return pool, trained(energy)


@program()
def variational_autoencoder(compiled: Wrap) -> Values:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(6, 8), nn.Linear(4, 6)

        def forward(self, x: torch.Tensor, weight: float) -> tuple[torch.Tensor, dict[str, Any]]:
            mean, log_variance = self.encode(x).chunk(2, dim=1)
            posterior = torch.distributions.Normal(mean, (0.5 * log_variance).exp())
            z = posterior.rsample()
            nats = torch.distributions.kl_divergence(posterior, torch.distributions.Normal(0.0, 1.0)).sum(1)
            error = F.binary_cross_entropy_with_logits(self.decode(z), x, reduction="none").sum(1)
            return (error + weight * nats).mean(), {"nats": nats.detach().mean(), "error": error.detach().mean()}

    model = Model()
    net, optimizer, told = compiled(model), torch.optim.NAdam(model.parameters(), 1e-2), []
    for step in range(4):
        optimizer.zero_grad()
        loss, parts = net(torch.rand(5, 6), min(1.0, step / 3))
        loss.backward()
        optimizer.step()
        told.append({name: value.item() for name, value in parts.items()})
    return told, trained(model)
