"""Build wheel and sdist, and use the wheel in an empty environment: `make package`.

Every block of Python in the documentation runs there too, in empty folders and without the sources of the package.
So do the commands of the pages on the command line and on training, and the recipes. The new environment has the wheel
alone. Its dependencies are those of the environment that runs this file, put after it on the path, so that nothing is
downloaded.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
USE = """
import sys
from importlib.metadata import version
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import hf_longspec
place = Path(hf_longspec.__file__)
assert place.is_relative_to(sys.prefix), place
assert version("hf_longspec") == hf_longspec.__version__
for name in ("py.typed", "hub/templates/longspec_draft.py"):
    assert (place.parent / name).is_file(), name
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval()
inputs = {"input_ids": torch.arange(3, 20)[None], "attention_mask": torch.ones(1, 17, dtype=torch.long)}
draft = hf_longspec.NgramDraftModel.from_target(model)
out = model.generate(**inputs, assistant_model=draft, max_new_tokens=16, do_sample=False)
assert out.tolist() == model.generate(**inputs, max_new_tokens=16, do_sample=False).tolist()
"""


def build(folder: Path) -> tuple[Path, Path]:
    """Build wheel and sdist in a copy of the tracked files, and return both."""
    source = folder / "source"
    source.mkdir()
    archive = folder / "source.tar"
    subprocess.run(["git", "-C", ROOT, "archive", "--output", archive, "HEAD"], check=True)
    with tarfile.open(archive) as tar:
        tar.extractall(source, filter="data")
    backend = f"import setuptools.build_meta as b; b.build_wheel({str(folder)!r}); b.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", backend], cwd=source, check=True, stdout=subprocess.DEVNULL)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def check_contents(wheel: Path, sdist: Path) -> None:
    """Check that the wheel holds the package alone, and the sdist all that the wheel was built from."""
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
    folders = {name.split("/")[0] for name in names}
    assert {name for name in folders if not name.endswith(".dist-info")} == {"hf_longspec"}, folders
    with tarfile.open(sdist) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    missing = {name for name in names if name.startswith("hf_longspec/")} - packed
    assert not missing and {"LICENSE", "README.md", "pyproject.toml"} <= packed, missing


def use(wheel: Path, folder: Path) -> Path:
    """Install the wheel in an empty environment, generate a text there and call the command; return its Python."""
    environment = folder / "environment"
    venv.create(environment)
    python = environment / "bin" / "python"
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", *options, wheel], check=True)
    site = next((environment / "lib").glob("python*/site-packages"))
    # a path in a .pth file follows the environment's own, and .pth files there, such as editable installs, are not read
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    clean = {"cwd": folder, "env": {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1"}, "check": True}
    subprocess.run([python, "-c", USE], **clean)
    shown = subprocess.run([environment / "bin" / "hf-longspec", "--version"], capture_output=True, text=True, **clean)
    assert wheel.name.split("-")[1] in shown.stdout, shown.stdout
    return python


def run_documentation(python: Path, source: Path, workers: str) -> None:
    """Run the blocks of all pages, and the notebook, in a checkout from which the package was taken away."""
    shutil.rmtree(source / "hf_longspec")
    names = ("docs/test_python_blocks", "docs/test_notebook", "training/test_documentation", "cli/test_documentation")
    tests = [f"tests/{name}.py" for name in (*names, "cli/test_recipes_as_written")]
    clean = {"PATH": os.environ["PATH"], "HOME": str(source), "HF_HUB_OFFLINE": "1"}
    subprocess.run([python, "-m", "pytest", "-q", "-n", workers, *tests], cwd=source, env=clean, check=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        built = build(Path(name))
        check_contents(*built)
        run_documentation(use(built[0], Path(name)), Path(name) / "source", *(sys.argv[1:] or ["auto"]))
        print("\n".join(path.name for path in built))
