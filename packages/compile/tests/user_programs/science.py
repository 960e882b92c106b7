"""Physics, statistics, graphs, optimal transport."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from user_programs import Values, Wrap, program, trained


@program()
def equation_learnt_by_its_residual(compiled: Wrap) -> Values:
    net = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))
    rate = nn.Parameter(torch.tensor(0.3))

    def residual(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        u = net(torch.stack([t, x], -1)).squeeze(-1)
        u_t, u_x = torch.autograd.grad(u.sum(), (t, x), create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        return u_t + u * u_x - rate * u_xx

    of = compiled(residual)
    optimizer = torch.optim.LBFGS([*net.parameters(), rate], max_iter=3)
    t, x, losses = torch.rand(10).requires_grad_(), torch.rand(10).requires_grad_(), []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        start = torch.linspace(-1, 1, 7)
        first = net(torch.stack([torch.zeros_like(start), start], -1)).squeeze(-1)
        loss = of(t, x).square().mean() + F.mse_loss(first, -(torch.pi * start).sin())
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return losses, rate, trained(net)


@program()
def bodies_that_pull_each_other(compiled: Wrap) -> Values:
    mass = torch.rand(5).add(0.5).requires_grad_()

    def force(x: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        apart = x[None] - x[:, None]
        distance = (apart.pow(2).sum(-1) + 0.1).rsqrt()
        return (apart * (distance**3 * mass[None])[..., None]).sum(1)

    def leap(x, v, mass, steps, dt):  # type: ignore[no-untyped-def]  # as users write it
        a, path = force(x, mass), [x]
        for _ in range(steps):
            v = v + 0.5 * dt * a
            x = x + dt * v
            a = force(x, mass)
            v += 0.5 * dt * a
            path.append(x)
        return torch.stack(path), v

    run, optimizer = compiled(leap), torch.optim.Rprop([mass], 1e-2)
    x, v = torch.randn(5, 3), torch.randn(5, 3) * 0.1
    with torch.no_grad():
        wanted, _ = run(x, v, torch.ones(5), 6, 0.05)
    for _ in range(3):
        optimizer.zero_grad()
        path, last = run(x, v, mass, 6, 0.05)
        F.mse_loss(path, wanted).backward()
        optimizer.step()
    return path, last, mass, mass.grad


@program()
def process_of_gauss(compiled: Wrap) -> Values:
    scale, noise, length = (nn.Parameter(torch.tensor(v)) for v in (0.1, -1.0, 0.2))

    def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return scale.exp() * torch.exp(-0.5 * torch.cdist(a, b).square() / length.exp() ** 2)

    def evidence(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        covariance = kernel(x, x) + noise.exp() * torch.eye(x.shape[0])
        root = torch.linalg.cholesky(covariance)
        weights = torch.cholesky_solve(y[:, None], root)
        return 0.5 * (y @ weights).squeeze() + root.diagonal().log().sum()

    def predicted(x: torch.Tensor, y: torch.Tensor, new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        root = torch.linalg.cholesky(kernel(x, x) + noise.exp() * torch.eye(len(x)))
        across = torch.linalg.solve_triangular(root, kernel(x, new), upper=False)
        whitened = torch.linalg.solve_triangular(root, y[:, None], upper=False)
        return (across.mT @ whitened).squeeze(-1), kernel(new, new).diagonal() - across.square().sum(0)

    x = torch.from_numpy(np.sort(np.random.default_rng(2).uniform(-2, 2, (9, 1)), axis=0))
    y, of = x.squeeze(-1).sin(), compiled(evidence)
    optimizer = torch.optim.Adam([scale, noise, length], 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        of(x, y).backward()
        optimizer.step()
    with torch.no_grad():
        return scale, noise, length, compiled(predicted)(x, y, torch.linspace(-3, 3, 5)[:, None])


@program(breaks=1)
def transport_until_it_converges(compiled: Wrap) -> Values:
    def plan(cost: torch.Tensor, a: torch.Tensor, b: torch.Tensor, heat: float) -> tuple[torch.Tensor, int]:
        f, g, steps = torch.zeros_like(a), torch.zeros_like(b), 0
        while steps < 50:
            last = f
            f = heat * (a.log() - torch.logsumexp((g[None] - cost) / heat, 1))
            g = heat * (b.log() - torch.logsumexp((f[:, None] - cost) / heat, 0))
            steps += 1
            if (f - last).abs().max().item() < 1e-3:
                break
        return torch.exp((f[:, None] + g[None] - cost) / heat), steps

    points, wanted = torch.randn(5, 2).requires_grad_(), torch.randn(6, 2)
    of, found = compiled(plan), []
    for _ in range(2):
        cost = torch.cdist(points, wanted).square()
        matrix, steps = of(cost, torch.full((5,), 0.2), torch.full((6,), 1 / 6), 0.5)
        points.grad = None
        (matrix * cost).sum().backward()
        with torch.no_grad():
            points -= 0.5 * points.grad
        found.append((steps, matrix.detach()))
    return found, points


@program(breaks=1, recompiles=True)
def messages_along_a_graph(compiled: Wrap) -> Values:
    class Attention(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.value, self.source, self.target = nn.Linear(width, width), nn.Linear(width, 1), nn.Linear(width, 1)

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            source, target = edges
            score = F.leaky_relu(self.source(x)[source] + self.target(x)[target], 0.2).squeeze(-1)
            largest = torch.full((x.size(0),), float("-inf")).scatter_reduce(0, target, score, "amax")
            weight = (score - largest[target]).exp()
            total = torch.zeros(x.size(0)).index_add(0, target, weight)
            message = self.value(x)[source] * (weight / total[target].clamp(min=1e-12))[:, None]
            return x + torch.zeros_like(x).scatter_add(0, target[:, None].expand_as(message), message)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.out = nn.ModuleList(Attention(6) for _ in range(2)), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor, count: int) -> torch.Tensor:
            for layer in self.layers:
                x = F.elu(layer(x, edges))
            sums = torch.zeros(count, x.shape[1]).index_add_(0, graph, x)
            return self.out(sums / torch.bincount(graph, minlength=count)[:, None])

    model = Net()
    net, optimizer = compiled(model), torch.optim.Adadelta(model.parameters())
    for nodes, edges in ((7, 12), (9, 15), (6, 11)):
        graph = torch.arange(nodes) * 2 // nodes
        links = torch.randint(0, nodes, (2, edges))
        optimizer.zero_grad()
        F.cross_entropy(net(torch.randn(nodes, 6), links, graph, 2), torch.tensor([0, 1])).backward()
        optimizer.step()
    return trained(model)


@program()
def filter_of_kalman(compiled: Wrap) -> Values:
    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.move, self.see = nn.Parameter(torch.eye(3) + 0.1), nn.Parameter(torch.randn(2, 3))
            self.process, self.noise = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))

        def forward(self, seen: torch.Tensor) -> torch.Tensor:
            mean, spread, total = torch.zeros(3), torch.eye(3), torch.zeros(())
            for y in seen.unbind(0):
                mean, spread = self.move @ mean, self.move @ spread @ self.move.T + torch.diag(self.process.exp())
                error, inside = y - self.see @ mean, self.see @ spread @ self.see.T + torch.diag(self.noise.exp())
                gain = torch.linalg.solve(inside, self.see @ spread).T
                mean, spread = mean + gain @ error, (torch.eye(3) - gain @ self.see) @ spread
                belief = torch.distributions.MultivariateNormal(torch.zeros(2), covariance_matrix=inside)
                total = total - belief.log_prob(error)
            return total

    model = Filter()
    net, optimizer = compiled(model), torch.optim.ASGD(model.parameters(), 1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(4, 2)).backward()
        optimizer.step()
    return trained(model)


@program()
def equilibrium_and_its_implicit_gradient(compiled: Wrap) -> Values:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(5, 5), nn.Linear(3, 5)
            self.inner.weight.data.mul_(0.5)

        def forward(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inner(z) + self.outer(x))

    layer = Layer()
    of = compiled(layer)

    def solved(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            z = torch.zeros(x.shape[0], 5)
            for _ in range(30):
                z = of(z, x)
        z = of(z, x)
        start = z.clone().detach().requires_grad_()
        again = of(start, x)

        def backward(slope: torch.Tensor) -> torch.Tensor:
            found = slope
            for _ in range(30):
                found = torch.autograd.grad(again, start, found, retain_graph=True)[0] + slope
            return found

        z.register_hook(backward)
        return z

    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        solved(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    return trained(layer)
