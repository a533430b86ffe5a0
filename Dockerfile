# A machine made ready: the trainer's environment and vLLM's, as docs/hardware.md installs them; `rlt` is the entry point.
#   docker build -t rlt_lightning .
#   docker run --gpus all --shm-size 16g -v "$PWD/runs:/data" rlt_lightning fit --config laptop/rlt --output_dir /data/q
# Arguments, by --build-arg NAME=VALUE:
#   BASE       any Debian or Ubuntu with Python 3.11 to 3.13; PyPI's PyTorch and vLLM bring their own CUDA libraries
#   WORKER     gpu: vLLM for the DRIVER of the machines that will run the image; cpu: its CPU build; none
#   EXTRAS     of the trainer
#   PIP_EXTRA_INDEX_URL    of other builds of PyTorch, such as https://download.pytorch.org/whl/cu126 (docs/hardware.md)
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

ARG EXTRAS=deepspeed,liger,wandb,tensorboard,quant
ARG PIP_EXTRA_INDEX_URL=
ARG PIP_NO_CACHE_DIR=1
RUN make setup EXTRAS="$EXTRAS"

ARG WORKER=gpu
ARG DRIVER=580
ARG VLLM=
ARG INDEX=
RUN [ "$WORKER" = none ] || "scripts/setup_vllm_$WORKER.sh"

ENV PATH=/opt/rlt/rlt_lightning/.venv/bin:$PATH
ENTRYPOINT ["rlt"]
CMD ["--help"]
