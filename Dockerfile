# A machine made ready, as docs/install.md installs it; `rlt` is the entry point.
#   docker build -t rlt_lightning .
#   docker run --gpus all --shm-size 16g -v "$PWD/runs:/data" rlt_lightning fit --config laptop/rlt --output_dir /data/q
# Arguments, by --build-arg NAME=VALUE:
#   BASE       any Debian or Ubuntu with Python 3.11 to 3.13; PyPI's PyTorch and vLLM bring their own CUDA libraries
#   EXTRAS     what to install; without vllm for a machine without GPUs
#   PIP_EXTRA_INDEX_URL    of other builds of PyTorch, such as https://download.pytorch.org/whl/cu126 (docs/install.md)
ARG BASE=nvidia/cuda:13.0.2-base-ubuntu24.04
FROM ${BASE}

# A compiler and Python's headers: Triton compiles kernels at run time.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates g++ make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# A number above those of people: the owner of what runs write into a mounted folder.
RUN useradd --uid 10001 --home-dir /opt/rlt --create-home rlt && install --directory --owner rlt /data
USER rlt
WORKDIR /opt/rlt/rlt_lightning
COPY --chown=rlt . .

ARG EXTRAS=deepspeed,liger,wandb,tensorboard,quant,vllm
ARG PIP_EXTRA_INDEX_URL=
ARG PIP_NO_CACHE_DIR=1
RUN make setup EXTRAS="$EXTRAS"

ENV PATH=/opt/rlt/rlt_lightning/.venv/bin:$PATH
ENTRYPOINT ["rlt"]
CMD ["--help"]
