"""Compile the Triton kernels to machine code for two GPUs, and print the GPUs. Run by test_sliced.py without one."""

import os

CONSTANTS = dict.fromkeys(("HAS_BIAS", "CAP", "BLOCK"), "constexpr")
SHARED = {"targets": "*i64", "width": "i32", "start": "i32", **CONSTANTS}


def compile_kernels(capability: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from agentrl.kernels.triton_epilogue import accumulate_sums_kernel, logit_gradient_kernel

    for out, bias, cap in (("*fp32", False, None), ("*bf16", True, None), ("*fp16", True, 30.0)):
        for kernel in (accumulate_sums_kernel, logit_gradient_kernel):
            types = {name: SHARED.get(name, "*fp32") for name in kernel.arg_names}
            if kernel is logit_gradient_kernel:
                types["out"] = out
            constants = {"HAS_BIAS": bias, "CAP": cap, "BLOCK": 2048}
            source = ASTSource(fn=kernel, signature=types, constexprs=constants)
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
            assert compiled.asm["cubin"]


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    for version in (80, 90):
        compile_kernels(version)
        print(f"sm_{version}")
