"""Pictures: classification, detection, segmentation, style, rendering."""

from __future__ import annotations

import enum
from collections import OrderedDict, defaultdict

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from user_programs import Values, Wrap, program, trained


def mixed_up(images: torch.Tensor, labels: torch.Tensor, draw: np.random.Generator) -> tuple[torch.Tensor, ...]:
    share = float(draw.beta(1.0, 1.0))
    order = torch.from_numpy(draw.permutation(images.shape[0]))
    h, w = images.shape[-2:]
    y, x = int(draw.integers(h)), int(draw.integers(w))
    half = int(h * (1 - share) ** 0.5) // 2
    rows, columns = slice(max(0, y - half), min(h, y + half)), slice(max(0, x - half), min(w, x + half))
    images = images.clone()
    images[:, :, rows, columns] = images[order][:, :, rows, columns]
    area = (rows.stop - rows.start) * (columns.stop - columns.start)
    return images, labels, labels[order], torch.tensor(1 - area / (h * w))


@program()
def classifier_with_cut_and_mixed_pictures(compiled: Wrap) -> Values:
    model = nn.Sequential(
        OrderedDict(
            stem=nn.Conv2d(3, 8, 3, padding=1, bias=False), norm=nn.BatchNorm2d(8), act=nn.ReLU(inplace=True),
            pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), drop=nn.Dropout(0.1), head=nn.Linear(8, 5),
        )
    ).to(memory_format=torch.channels_last)  # fmt: skip
    decayed = [p for p in model.parameters() if p.ndim > 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": [p for p in model.parameters() if p.ndim <= 1]}]
    optimizer = torch.optim.AdamW(groups, 1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=6)
    average = torch.optim.swa_utils.AveragedModel(model)
    net, draw, right = compiled(model), np.random.default_rng(3), defaultdict(list)
    for epoch in range(2):
        model.train()
        for _ in range(3):
            images = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
            images, a, b, share = mixed_up(images, torch.randint(0, 5, (4,)), draw)
            out = net(images)
            loss = share * F.cross_entropy(out, a) + (1 - share) * F.cross_entropy(out, b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        average.update_parameters(model)
        model.eval()
        with torch.no_grad():
            right[epoch].append((net(images).argmax(1) == a).double().mean().item())
    torch.optim.swa_utils.update_bn([torch.randn(4, 3, 8, 8) for _ in range(2)], average)
    return dict(right), schedule.get_last_lr(), trained(model), trained(average)


def overlaps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    low, high = torch.maximum(a[:, None, :2], b[None, :, :2]), torch.minimum(a[:, None, 2:], b[None, :, 2:])
    inside = (high - low).clamp(min=0).prod(-1)
    area = lambda boxes: (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    return inside / (area(a)[:, None] + area(b)[None] - inside)


@program()
def detector_that_matches_boxes(compiled: Wrap) -> Values:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.boxes, self.classes = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 3, 1)
            ys, xs = torch.meshgrid(torch.arange(4) * 2.0, torch.arange(4) * 2.0, indexing="ij")
            self.register_buffer("anchors", torch.stack([xs, ys, xs + 3, ys + 3], -1).view(-1, 4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = F.relu(self.body(x))
            flat = lambda y: y.permute(0, 2, 3, 1).reshape(y.shape[0], -1, y.shape[1])
            return self.anchors + flat(self.boxes(x)), flat(self.classes(x))

    def loss_of(boxes, scores, wanted, labels):  # type: ignore[no-untyped-def]  # as users write it
        total = boxes.new_zeros(())
        for found, score, want, label in zip(boxes, scores, wanted, labels, strict=True):
            best, match = overlaps(found.detach(), want).max(1)
            positive = best > 0.3
            target = F.one_hot(label[match], 3) * positive[:, None]
            chance = score.sigmoid()
            focal = (target - chance).abs() ** 2 * F.binary_cross_entropy_with_logits(
                score, target.to(score.dtype), reduction="none"
            )
            error = F.smooth_l1_loss(found, want[match], reduction="none").sum(-1)
            total = total + focal.sum() + torch.where(positive, error, 0.0).sum() / positive.sum().clamp(min=1)
        return total

    def kept(boxes: torch.Tensor, scores: torch.Tensor) -> list[int]:
        order, out = scores.argsort(descending=True), []
        while order.numel():
            first, order = order[0], order[1:]
            out.append(int(first))
            order = order[overlaps(boxes[first][None], boxes[order])[0] < 0.5]
        return out

    detector = Detector()
    net, loss = compiled(detector), compiled(loss_of)
    optimizer = torch.optim.SGD(detector.parameters(), 1e-2, momentum=0.9, weight_decay=1e-4)
    for _ in range(3):
        corners = torch.rand(2, 3, 2) * 4
        wanted = torch.cat([corners, corners + 1 + torch.rand(2, 3, 2) * 3], -1)
        optimizer.zero_grad()
        loss(*net(torch.randn(2, 3, 8, 8)), wanted, torch.randint(0, 3, (2, 3))).backward()
        optimizer.step()
    with torch.no_grad():
        boxes, scores = net(torch.randn(1, 3, 8, 8))
        return kept(boxes[0], scores[0].amax(-1)), trained(detector)


class Head(enum.Enum):
    MASK = "mask"
    EDGE = "edge"


@program()
def segmentation_with_several_heads(compiled: Wrap) -> Values:
    class Net(nn.Module):
        def __init__(self, width: int = 4) -> None:
            super().__init__()
            self.downs = nn.ModuleList([nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, padding=1)])
            self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
            self.ups = nn.ModuleList(
                [nn.Conv2d(4 * width, width, 3, padding=1), nn.Conv2d(2 * width, width, 3, padding=1)]
            )
            self.heads = nn.ModuleDict({head.value: nn.Conv2d(width, 2, 1) for head in Head})

        def forward(self, x: torch.Tensor) -> dict[Head, torch.Tensor]:
            size, skips = x.shape[-2:], []
            for down in self.downs:
                x = F.gelu(down(x))
                skips.append(x)
                x = F.max_pool2d(x, 2, ceil_mode=True)
            x = self.middle(x)
            for up, skip in zip(self.ups, reversed(skips), strict=True):
                x = F.interpolate(x, size=skip.shape[-2:], mode="bilinear", align_corners=False)
                x = F.gelu(up(torch.cat([x, skip], 1)))
            return {head: F.interpolate(self.heads[head.value](x), size) for head in Head}

    def dice(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        p, wanted = logits.softmax(1), F.one_hot(target, 2).permute(0, 3, 1, 2)
        return 1 - (2 * (p * wanted).sum((0, 2, 3)) + 1).div((p + wanted).sum((0, 2, 3)) + 1).mean()

    model = Net()
    net, optimizer = compiled(model), torch.optim.Adam(model.parameters(), 1e-2, maximize=False, foreach=True)
    matrix = torch.zeros(2, 2, dtype=torch.long)
    for _ in range(3):
        images, target = torch.randn(2, 1, 9, 7), torch.randint(0, 2, (2, 9, 7))
        target[:, 0] = 0
        out = net(images)
        weights = {Head.MASK: 1.0, Head.EDGE: 0.5}
        optimizer.zero_grad(set_to_none=False)
        sum(weights[h] * (dice(o, target) + F.cross_entropy(o, target)) for h, o in out.items()).backward()
        optimizer.step()
        found = out[Head.MASK].argmax(1)
        matrix += torch.bincount(target.flatten() * 2 + found.flatten(), minlength=4).view(2, 2)
    return matrix.tolist(), trained(model)


@program()
def style_of_a_picture(compiled: Wrap) -> Values:
    layers = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()
    )
    layers.requires_grad_(False).eval()
    caught: dict[int, torch.Tensor] = {}
    for number in (1, 4):
        layers[number].register_forward_hook(lambda module, args, out, number=number: caught.__setitem__(number, out))

    def gram(x: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.size()
        x = x.view(b, c, h * w)
        return x @ x.mT / (c * h * w)

    net, style, picture = compiled(layers), torch.rand(1, 3, 8, 8), torch.rand(1, 3, 8, 8).requires_grad_()
    net(style)
    wanted = {n: gram(x) for n, x in caught.items()}
    optimizer, losses = torch.optim.LBFGS([picture], max_iter=4, line_search_fn="strong_wolfe"), []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        net(picture)
        smooth = (picture[..., 1:] - picture[..., :-1]).abs().mean()
        loss = sum(F.mse_loss(gram(caught[n]), wanted[n]) for n in wanted) * 1e3 + 0.01 * smooth
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return losses, picture, picture.grad


@program()
def rays_rendered_through_a_field(compiled: Wrap) -> Values:
    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(3 + 3 * 2 * 3, 16), nn.ReLU(), nn.Linear(16, 4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            waves = [f(x * 2.0**k) for k in range(3) for f in (torch.sin, torch.cos)]
            out = self.body(torch.cat([x, *waves], -1))
            return out[..., :3].sigmoid(), F.relu(out[..., 3])

    field = Field()

    def render(origin: torch.Tensor, direction: torch.Tensor, near: float, far: float, count: int) -> torch.Tensor:
        depth = torch.linspace(near, far, count).expand(origin.shape[0], count)
        middle = 0.5 * (depth[:, 1:] + depth[:, :-1])
        low, high = torch.cat([depth[:, :1], middle], -1), torch.cat([middle, depth[:, -1:]], -1)
        depth = low + (high - low) * torch.rand_like(low)
        color, density = field(origin[:, None] + direction[:, None] * depth[..., None])
        steps = torch.cat([depth[:, 1:] - depth[:, :-1], torch.full_like(depth[:, :1], 1e10)], -1)
        opacity = 1 - torch.exp(-density * steps)
        through = torch.cumprod(torch.cat([torch.ones_like(opacity[:, :1]), 1 - opacity + 1e-10], -1), -1)[:, :-1]
        weights = opacity * through
        return (weights[..., None] * color).sum(1) + (1 - weights.sum(-1, keepdim=True))

    of, optimizer = compiled(render), torch.optim.Adam(field.parameters(), 1e-2, eps=1e-10)
    for _ in range(3):
        origin, direction = torch.randn(6, 3), F.normalize(torch.randn(6, 3), dim=-1)
        optimizer.zero_grad()
        F.mse_loss(of(origin, direction, 0.5, 2.0, 6), torch.rand(6, 3)).backward()
        optimizer.step()
    return trained(field)


@program()
def attacked_while_it_trains(compiled: Wrap) -> Values:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ELU(), nn.Flatten(), nn.LazyLinear(3)
    )
    model(torch.zeros(1, 1, 6, 6))
    net, optimizer = compiled(model), torch.optim.SGD(model.parameters(), 0.05)

    def attacked(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        change = torch.empty_like(x).uniform_(-0.1, 0.1)
        for _ in range(3):
            change.requires_grad_(True)
            (slope,) = torch.autograd.grad(F.cross_entropy(net(x + change), y), change)
            change = (change.detach() + 0.05 * slope.sign()).clamp_(-0.1, 0.1)
            change = torch.clamp(x + change, 0, 1) - x
        return (x + change).detach()

    for _ in range(3):
        x, y = torch.rand(4, 1, 6, 6), torch.randint(0, 3, (4,))
        worst = attacked(x, y)
        optimizer.zero_grad()
        clean, moved = net(x), net(worst)
        loss = F.cross_entropy(clean, y) + 2 * F.kl_div(moved.log_softmax(1), clean.softmax(1), reduction="batchmean")
        loss.backward()
        optimizer.step()
    return trained(model, worst)
