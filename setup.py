"""The compiled kernels; everything else is in pyproject.toml.

They are optional: where there is no C compiler, installation goes on without them, and numpy serves instead.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "protocol.kernels",
            ["protocol/kernels.c"],
            # One binary for every Python from 3.11 on. Nothing that would round otherwise: no fusing, no -ffast-math.
            py_limited_api=True,
            extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"],
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
