"""Build the stand-in for CUDA, once for each version of it and of PyTorch, into the cache folder."""

import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from filelock import FileLock

from speedkit.errors import SpeedkitError
from speedkit.machine import cache_root

SOURCE = Path(__file__).with_name("dry_gpu.cpp")
LIBRARY = "libdrygpu.so"
NVRTC = f"libnvrtc.so.{(torch.version.cuda or '').partition('.')[0]}"
DRIVER = "libcuda.so.1"  # the same library, under the name that Triton loads
ASKING = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_python.so", "libcaffe2_nvrtc.so")
OF_CUDA = re.compile(r"(cu[A-Z]|cuda[A-Z]|__cuda|cublas|cusparse|cusolver|cufft|curand|cudnn|nccl)\w+")
# What Triton's own code, compiled on first use, asks of the driver besides.
OF_DRIVER = (
    "cuCtxGetLimit",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoD_v2",
    "cuPointerGetAttributes",
    "cuTensorMapEncodeTiled",
)
# Stubs that may be called, for they need do nothing.
MAY_DO_NOTHING = {
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasSetMathMode",
    "cublasSetStream_v2",
    "cublasSetWorkspace_v2",
    "cudaEventQuery",  # whatever was asked for is done
    "cudaFuncSetAttribute",
    "cudaGraphDestroy",
    "cudaGraphExecDestroy",
    "cudaStreamWaitEvent",
    "cudnnCreateTensorDescriptor",  # of batch normalization, which asks for nothing of it
    "cudnnDestroyTensorDescriptor",
    "cudnnSetStream",
    "cudnnSetTensorNdDescriptor",
    "cufftDestroy",
    "cufftSetAutoAllocation",
    "cufftSetStream",
    "cufftSetWorkArea",
    "ncclCommAbort",
    "ncclGroupEnd",
    "ncclGroupStart",
}
LEFT_OUT = {"cudnnGetVersion"}  # cuDNN's own tells the version that PyTorch was built for
STUB = 'int {0}(void) {{ static const char name[] = "{0}"; dry_stub(name); return 0; }}\n'


def build() -> Path:
    """Return the folder that holds the stand-in, built if it is not there yet.

    Raises SpeedkitError where a compiler is missing, or where PyTorch has no CUDA code to run.
    """
    if torch.version.cuda is None:
        raise SpeedkitError(f"torch {torch.__version__} is a CPU build, without CUDA code: install the ordinary one")
    for tool in ("g++", "nm"):
        if shutil.which(tool) is None:
            raise SpeedkitError(f"the GPU that is not there is built by {tool}, which is missing: install g++")
    facts = f"{torch.__version__} {SOURCE.read_text()} {Path(__file__).read_text()}"
    folder = cache_root() / f"dry-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if not (folder / DRIVER).exists():
            with tempfile.TemporaryDirectory() as work:
                compile_in(Path(work))
                for name in (LIBRARY, NVRTC):
                    shutil.copy(Path(work, name), folder / name)
            (folder / DRIVER).symlink_to(LIBRARY)
    return folder


def compile_in(work: Path) -> None:
    """Compile the libraries in the folder `work`, with a stub for each name that the source does not have."""
    site = Path(torch.__file__).parents[1]
    core = work / "core.o"
    headers = [f"-I{path}" for path in (*site.glob("nvidia/*/include"), site / "triton/backends/nvidia/include")]
    called("g++", "-std=c++17", "-O1", "-fPIC", *headers, "-c", SOURCE, "-o", core)
    present = set(called("nm", "--defined-only", "--format=just-symbols", core).split())
    wanted = set(OF_DRIVER)
    for name in ASKING:
        symbols = called("nm", "-D", "--undefined-only", "--format=just-symbols", site / "torch" / "lib" / name)
        wanted |= {symbol.partition("@")[0] for symbol in symbols.split()}
    stubs = set(filter(OF_CUDA.fullmatch, wanted))
    text = "void dry_stub(const char*);\n"
    for name in sorted(stubs - present - LEFT_OUT):
        text += STUB.format(name)
    (work / "stubs.c").write_text(text)
    called("g++", "-x", "c", "-O1", "-fPIC", "-w", "-c", work / "stubs.c", "-o", work / "stubs.o")
    called("g++", "-shared", f"-Wl,-soname,{LIBRARY}", "-o", work / LIBRARY, core, work / "stubs.o", "-ldl")
    # An empty library of NVRTC's name: what PyTorch looks up in it is found in the one that it needs.
    called("g++", "-shared", f"-Wl,-soname,{NVRTC},--no-as-needed", "-o", work / NVRTC, work / LIBRARY)


def called(*command: str | Path) -> str:
    """Return what a command has written. Raises SpeedkitError where it fails, with its last words."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise SpeedkitError(f"the GPU that is not there cannot be built: {command[0]}: {' '.join(errors[:1])}")
    return done.stdout
