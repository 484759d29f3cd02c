"""The package tfbig; `make train` does `pip install -e .[cpu,test]` into .venv/."""

from setuptools import find_packages, setup

# TensorFlow and Keras are held to the releases that tfbig's measurements and Horovod's edits were
# made on. Neither extra is required: tensorflow and tensorflow-cpu overwrite each other's files,
# and a package can't know which one its user has or wants.
TENSORFLOW = ">=2.21,<2.22"

SERVE = ["jinja2>=3.1", "prometheus-client>=0.20", "starlette>=0.40", "uvicorn>=0.30"]

setup(
    name="tfbig",
    version="0.1.0",
    description="Trains GPT language models of any size with TensorFlow, Keras and Horovod",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",  # those that TensorFlow 2.21 has wheels for
    packages=find_packages(
        include=["tfbig", "tfbig.*", "trainers", "trainers.*", "data_pipeline", "data_pipeline.*"]
    ),
    package_data={"tfbig": ["py.typed", "planner/constants.json", "serving/page.html"]},
    install_requires=[
        "absl-py>=2.1",
        "google-crc32c>=1.6",
        "importlib-resources",  # tensorflow-datasets' builders need it and don't say so
        "huggingface_hub>=0.30,<3",  # model cards and uploads; tokenizers needs it too
        "keras>=3.12,<3.16",  # 3.12 is the last one for Python 3.10
        "numpy>=2.0,<3",
        "orjson>=3.10",
        "packaging",
        "plotly>=6",
        "psutil>=5.9",
        "rich>=13",
        "safetensors>=0.5",
        "tensorboard>=2.20,<2.22",
        "tensorflow-datasets>=4.9.9,<5",
        "tiktoken>=0.9",
        "tokenizers>=0.21,<1",
        "zstandard>=0.23",
        # Horovod's own, which `python -m tfbig.install_horovod` builds and installs
        "cloudpickle",
        "pyyaml",
    ],
    extras_require={
        "cpu": [f"tensorflow-cpu{TENSORFLOW}"],
        "gpu": [f"tensorflow[and-cuda]{TENSORFLOW}", "nvidia-ml-py>=12"],
        "serve": SERVE,
        # ruff's formatting and findings change with its versions
        "test": [
            "hypothesis>=6.100",
            "mypy>=1.15,<3",
            "pandas>=2.2",
            "pytest>=8,<10",
            "pytest-xdist>=3.6,<4",
            "ruff>=0.12,<0.18",
            *SERVE,
            "httpx>=0.27",
            "openai>=1.50",
        ],
        "mlflow": ["mlflow-skinny>=2.20"],
        "wandb": ["wandb>=0.19"],
        "notebook": ["ipython>=8", "pandas>=2.2"],
        "parquet": ["pyarrow>=17"],
        "gigatoken": ["gigatoken>=0.10,<0.11"],
        "dedup": ["rensa>=0.5,<0.6"],
        "evaluation": ["lm-eval>=0.4.8"],
        "summarisation": ["rouge-score>=0.1.2"],
        "interop": ["torch>=2.4", "transformers>=4.48", "rouge-score>=0.1.2"],
    },
    entry_points={"console_scripts": ["tfbig = tfbig.__main__:main"]},
)
