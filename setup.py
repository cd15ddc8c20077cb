"""What pyproject.toml cannot say: the patches, of which there is a folder for each tag. All else is there."""

from glob import glob

from setuptools import setup

setup(data_files=[
    (f"share/megatron_elastic/{folder}", sorted(glob(f"{folder}/*.patch"))) for folder in sorted(glob("patches/*"))
])
