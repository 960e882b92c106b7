"""A small vision transformer, exported, compiled and run by a C++ program without Python, at two batch sizes."""

import shlex
import subprocess
import tempfile
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

import torchcompile
import torchinductor
from primtorch.building import compiler
from torchcompile import Dim


class Block(torch.nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_behind = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norm_behind(x))


class Vit(torch.nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, depth: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(3, width, 8, stride=8)
        self.places = torch.nn.Parameter(torch.randn(16, width) * 0.1)
        self.blocks = torch.nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = torch.nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.blocks(tokens).mean(1)).softmax(-1)


def built(source: Path, folder: Path) -> Path:
    """The C++ program, linked to this environment's torch."""
    library = Path(torchinductor.library_path())
    folders = (*library_paths(), str(library.parent))
    found = [f"-I{path}" for path in (torchinductor.include_path(), *include_paths())]
    found += [f"-L{path}" for path in folders] + [f"-Wl,-rpath,{path}" for path in folders]
    program = folder / "program"
    command = [
        *compiler(),
        "-O2",
        "-std=c++20",
        str(source),
        *found,
        "-ltorchinductor",
        "-ltorch_cpu",
        "-ltorch",
        "-lc10",
    ]
    print(shlex.join(command), "-o program")
    subprocess.run([*command, "-o", str(program)], check=True)
    return program


def main() -> None:
    torch.manual_seed(0)
    model = Vit().eval()
    with tempfile.TemporaryDirectory() as work, torch.no_grad():
        folder = Path(work)
        sizes = {"images": {0: Dim("batch", min=2, max=64)}}
        exported = torchcompile.export(model, torch.randn(2, 3, 32, 32), dynamic_shapes=sizes)
        torchcompile.save_cpp(exported, folder / "vit")

        program = built(Path(__file__).with_name("program.cpp"), folder)
        for batch in (3, 8):
            images = torch.randn(batch, 3, 32, 32)
            (folder / "images").write_bytes(images.numpy().tobytes())
            subprocess.run([program, folder / "vit", folder / "images", str(batch), folder / "scores"], check=True)
            scores = torch.frombuffer(bytearray((folder / "scores").read_bytes()), dtype=torch.float32).view(batch, 10)
            exact = model.double()(images.double())
            model.float()
            print(f"batch {batch}: off eager in float64 by {(scores - exact).abs().max():.1e}")
            assert torch.allclose(scores.double(), exact, atol=1e-6)


if __name__ == "__main__":
    main()
