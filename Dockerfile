# Two images, both with `zero-inference` as their program:
#
#   docker build --target cpu -t zero-inference:cpu .
#   docker build --target cuda -t zero-inference:cuda .
#
#   docker run --rm -v zero-inference-cache:/cache zero-inference:cpu run --model opt-125m --dummy --engine stream
#   docker run --rm --gpus all --ulimit memlock=-1 -v zero-inference-cache:/cache -v "$PWD/logs:/srv/logs" \
#       zero-inference:cuda run --model meta-llama/Llama-3.1-70B --engine stream --quant-bits 4
#
# --gpus all         the GPUs; the host needs NVIDIA's driver and its container toolkit
# --ulimit memlock   weights in host memory are page-locked; without it they are copied at a fraction of the link's speed, or not at all
# --shm-size 16g     only for several ranks of DeepSpeed, which share memory through /dev/shm; a container has 64 MiB by default
# --user             the image runs as user 1000; another one may be given, because /cache and /srv are open to all
#
# The volume /cache holds models of the hub, compiled kernels and what `zero-inference link --save` measured; /srv is the current folder.
# docs/install.md says more. The steps are in docker/install.sh and scripts/smoke_test.sh.

ARG CPU_IMAGE=python:3.12-slim
# With nvcc, which compiles our kernels and DeepSpeed's at first use.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04

FROM ${CPU_IMAGE} AS cpu-build
# PyTorch's own index of CPU builds makes the image 3 GB smaller: --build-arg TORCH_INDEX=...
ARG TORCH_INDEX=
WORKDIR /src
COPY docker docker
RUN docker/install.sh system
COPY . .
RUN TORCH_INDEX="${TORCH_INDEX}" docker/install.sh python

FROM ${CUDA_IMAGE} AS cuda-build
ARG TORCH_INDEX=
WORKDIR /src
COPY docker docker
RUN docker/install.sh system
COPY . .
RUN TORCH_INDEX="${TORCH_INDEX}" docker/install.sh python

FROM ${CPU_IMAGE} AS cpu
COPY docker/install.sh /src/docker/
RUN /src/docker/install.sh system
COPY --from=cpu-build /opt/venv /opt/venv
COPY scripts/smoke_test.sh /src/scripts/
ENV PATH=/opt/venv/bin:$PATH XDG_CACHE_HOME=/cache HOME=/srv USER=zero-inference PYTHONUNBUFFERED=1
RUN mkdir -p /cache /srv/logs && chmod 1777 /cache /srv /srv/logs
USER 1000
WORKDIR /srv
RUN XDG_CACHE_HOME=/tmp/cache /src/scripts/smoke_test.sh && rm -rf /tmp/cache
VOLUME /cache
ENTRYPOINT ["zero-inference"]
CMD ["--help"]

FROM ${CUDA_IMAGE} AS cuda
COPY docker/install.sh /src/docker/
RUN /src/docker/install.sh system
COPY --from=cuda-build /opt/venv /opt/venv
COPY scripts/smoke_test.sh /src/scripts/
ENV PATH=/opt/venv/bin:$PATH XDG_CACHE_HOME=/cache HOME=/srv USER=zero-inference PYTHONUNBUFFERED=1
RUN mkdir -p /cache /srv/logs && chmod 1777 /cache /srv /srv/logs
USER 1000
WORKDIR /srv
RUN XDG_CACHE_HOME=/tmp/cache /src/scripts/smoke_test.sh && rm -rf /tmp/cache
VOLUME /cache
ENTRYPOINT ["zero-inference"]
CMD ["--help"]
