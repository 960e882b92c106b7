"""Agents: policies, values, replay."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from user_programs import Values, Wrap, program, trained


class Walk:
    """A world of one number, which actions move."""

    def __init__(self, seed: int) -> None:
        self.draw, self.place, self.time = np.random.default_rng(seed), 0.0, 0

    def reset(self) -> np.ndarray:
        self.place, self.time = float(self.draw.normal()), 0
        return self.seen()

    def seen(self) -> np.ndarray:
        return np.array([self.place, self.time / 6, np.sign(self.place)])

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        self.place += (action - 1) * 0.5 + 0.1 * float(self.draw.normal())
        self.time += 1
        return self.seen(), -abs(self.place), self.time == 6


@program()
def values_learnt_from_a_replay(compiled: Wrap) -> Values:
    class Duel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.value, self.gain = nn.Linear(3, 12), nn.Linear(12, 1), nn.Linear(12, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.body(x))
            gain = self.gain(x)
            return self.value(x) + gain - gain.mean(-1, keepdim=True)

    online, target = Duel(), Duel()
    target.load_state_dict(online.state_dict())
    now, later = compiled(online), compiled(target)
    optimizer, memory, world = torch.optim.Adam(online.parameters(), 1e-2), deque(maxlen=30), Walk(5)
    draw, rewards = random.Random(4), 0.0
    for episode in range(4):
        state, done = world.reset(), False
        while not done:
            with torch.no_grad():
                action = draw.randrange(3) if draw.random() < 0.5 else int(now(torch.from_numpy(state)[None]).argmax())
            after, reward, done = world.step(action)
            memory.append((state, action, reward, after, done))
            state, rewards = after, rewards + reward
        parts = zip(*draw.sample(list(memory), min(8, len(memory))), strict=True)
        s, a, r, n, d = (torch.as_tensor(np.stack([np.asarray(x) for x in part])) for part in parts)
        with torch.no_grad():
            best = now(n).argmax(1, keepdim=True)
            wanted = r + 0.9 * later(n).gather(1, best).squeeze(1) * (~d)
        loss = F.huber_loss(now(s).gather(1, a[:, None]).squeeze(1), wanted)
        optimizer.zero_grad()
        loss.backward()
        for p in online.parameters():
            p.grad.data.clamp_(-1, 1)
        optimizer.step()
        for old, new in zip(target.parameters(), online.parameters(), strict=True):
            old.data.copy_(0.9 * old.data + 0.1 * new.data)
    return rewards, trained(online), list(target.parameters())


@program()
def policy_held_near_the_last(compiled: Wrap) -> Values:
    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(3, 12), nn.Tanh())
            self.policy, self.value = nn.Linear(12, 3), nn.Linear(12, 1)
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    nn.init.orthogonal_(module.weight, 2**0.5)
                    nn.init.zeros_(module.bias)

        def forward(self, x: torch.Tensor, action: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
            x = self.body(x)
            policy = Categorical(logits=self.policy(x))
            if action is None:
                action = policy.sample()
            return action, policy.log_prob(action), policy.entropy(), self.value(x).squeeze(-1)

    actor, world = Actor(), Walk(8)
    act, optimizer, told = compiled(actor), torch.optim.Adam(actor.parameters(), 1e-2, eps=1e-5), []

    def advantages(rewards: torch.Tensor, values: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        found, running = torch.zeros_like(rewards), 0.0
        for t in reversed(range(len(rewards))):
            after = last if t == len(rewards) - 1 else values[t + 1]
            running = rewards[t] + 0.95 * after - values[t] + 0.95 * 0.9 * running
            found[t] = running
        return found

    for _ in range(2):
        seen, actions, logs, values, rewards, state = [], [], [], [], [], world.reset()
        with torch.no_grad():
            for _ in range(6):
                x = torch.from_numpy(state)
                action, log, _, value = act(x)
                state, reward, _ = world.step(int(action))
                seen.append(x)
                actions.append(action)
                logs.append(log)
                values.append(value)
                rewards.append(reward)
            last = act(torch.from_numpy(state))[3]
            x, a, old, v = map(torch.stack, (seen, actions, logs, values))
            gain = compiled(advantages)(torch.tensor(rewards), v, last)
        for _ in range(2):
            for rows in torch.randperm(6).split(3):
                _, log, entropy, value = act(x[rows], a[rows])
                ratio = (log - old[rows]).exp()
                g = (gain[rows] - gain[rows].mean()) / (gain[rows].std() + 1e-8)
                bound = torch.max(-g * ratio, -g * ratio.clamp(0.8, 1.2)).mean()
                loss = bound + 0.5 * F.mse_loss(value, gain[rows] + v[rows]) - 0.01 * entropy.mean()
                optimizer.zero_grad()
                loss.backward()
                told.append(float(nn.utils.clip_grad_norm_(actor.parameters(), 0.5)))
                optimizer.step()
    return told, trained(actor)


@program()
def soft_actor_with_two_critics(compiled: Wrap) -> Values:
    actor = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 4))
    critics = nn.ModuleList(nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 1)) for _ in range(2))
    targets = nn.ModuleList(nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 1)) for _ in range(2))
    targets.load_state_dict(critics.state_dict())
    heat = torch.zeros((), requires_grad=True)
    of_actor, of_critics = (torch.optim.Adam(m.parameters(), 1e-2) for m in (actor, critics))
    of_heat = torch.optim.Adam([heat], 1e-2)

    def drawn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_scale = actor(x).chunk(2, -1)
        policy = TransformedDistribution(Normal(mean, log_scale.clamp(-5, 2).exp()), [TanhTransform(cache_size=1)])
        action = policy.rsample()
        return action, policy.log_prob(action).sum(-1, keepdim=True)

    def critic_loss(s, a, r, n):  # type: ignore[no-untyped-def]  # as users write it
        with torch.no_grad():
            action, log = drawn(n)
            after = torch.min(*(c(torch.cat([n, action], -1)) for c in targets)) - heat.exp() * log
        return sum(F.mse_loss(c(torch.cat([s, a], -1)), r + 0.9 * after) for c in critics)

    def actor_loss(s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        action, log = drawn(s)
        best = torch.min(*(c(torch.cat([s, action], -1)) for c in critics))
        return (heat.exp().detach() * log - best).mean(), log.detach()

    of_value, of_policy = compiled(critic_loss), compiled(actor_loss)
    for _ in range(3):
        s, a, r, n = torch.randn(6, 3), torch.rand(6, 2) * 2 - 1, torch.randn(6, 1), torch.randn(6, 3)
        of_critics.zero_grad()
        of_value(s, a, r, n).backward()
        of_critics.step()
        critics.requires_grad_(False)
        loss, log = of_policy(s)
        of_actor.zero_grad()
        loss.backward()
        of_actor.step()
        critics.requires_grad_(True)
        of_heat.zero_grad()
        (-heat * (log - 2)).mean().backward()
        of_heat.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(targets.parameters()), list(critics.parameters()), 0.1)
    return heat, trained(actor), trained(critics), list(targets.parameters())


@program(recompiles=True)
def evolution_over_a_population(compiled: Wrap) -> Values:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    center = nn.utils.parameters_to_vector(model.parameters()).detach()
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def score(flat: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        sizes = [s.numel() for s in shapes.values()]
        parts = {name: part.view(shapes[name]) for name, part in zip(shapes, flat.split(sizes), strict=True)}
        return -(torch.func.functional_call(model, parts, (x,)) - x.sum(-1, keepdim=True)).square().mean()

    scores, history = compiled(torch.vmap(score, in_dims=(0, None))), []
    for count in (6, 6, 8):
        half = torch.randn(count // 2, center.numel())
        noise = torch.cat([half, -half])
        found = scores(center + 0.1 * noise, torch.randn(5, 3))
        ranks = found.argsort().argsort().to(center.dtype) / (count - 1) - 0.5
        center = center + 0.5 * (ranks[:, None] * noise).mean(0)
        history.append(found.max().item())
    return history, center
