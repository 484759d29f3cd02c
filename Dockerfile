# tfbig with TensorFlow and our Horovod, for GPUs or for CPUs:
#   docker build -t tfbig:gpu .
#   docker build -t tfbig:cpu --build-arg BASE=debian:12 --build-arg EXTRA=cpu .
# BASE needs Python 3.10 to 3.13 among its packages; for GPUs CUDA 12's nvcc and headers.
# SageMaker and the MPI operator start containers as root: --build-arg RUN_AS=root for them.
# Without Docker: deploy/build_image.sh.
ARG BASE=nvidia/cuda:12.5.1-devel-ubuntu22.04
FROM ${BASE}

# The machine's own package index and certificates, where it has some; none of it stays.
ARG PIP_INDEX_URL
ARG PIP_CERT
ARG DEBIAN_FRONTEND=noninteractive

# sshd and ssh are for horovodrun and the MPI operator.
RUN apt-get update \
 && apt-get install -y --no-install-recommends \
      python3 python3-dev python3-venv g++ make ca-certificates openssh-client openssh-server \
 && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
 && mkdir -p /run/sshd \
 && printf 'StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\n' \
      > /etc/ssh/ssh_config.d/tfbig.conf \
 && printf 'StrictModes no\n' > /etc/ssh/sshd_config.d/tfbig.conf

ENV PATH=/opt/tfbig/bin:${PATH} PYTHONUNBUFFERED=1
RUN python3 -m venv /opt/tfbig && pip install --no-cache-dir 'pip>=24.2' cmake

# The packages first: a change of the code doesn't install them anew. What setuptools leaves in build/
# is newer than the code that comes next, and would be taken for it.
ARG EXTRA=gpu
WORKDIR /src
COPY setup.py ./
RUN mkdir tfbig trainers data_pipeline \
 && touch tfbig/__init__.py trainers/__init__.py data_pipeline/__init__.py \
 && pip install --no-cache-dir ".[${EXTRA},serve]" \
 && pip uninstall -y tfbig \
 && rm -rf build tfbig.egg-info

# On GPUs with NCCL, which PyPI has without the name that linkers look for.
ARG CUDA_CAPABILITIES=70,75,80,86,89,90
COPY tfbig tfbig
COPY trainers trainers
COPY data_pipeline data_pipeline
RUN pip install --no-cache-dir --no-deps . \
 && cd / \
 && if [ "${EXTRA}" = gpu ]; then \
      nccl=$(python -c 'import nvidia.nccl as n; print(list(n.__path__)[0])') \
      && ln -sf libnccl.so.2 "$nccl/lib/libnccl.so" \
      && export HOROVOD_GPU=CUDA HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED \
           HOROVOD_CUDA_HOME=/usr/local/cuda HOROVOD_NCCL_HOME="$nccl" \
           HOROVOD_BUILD_CUDA_CC_LIST="${CUDA_CAPABILITIES}"; \
    fi \
 && TFBIG_CACHE=/tmp/cache python -m tfbig.install_horovod \
 && rm -rf /tmp/cache /src

COPY deploy/entrypoint /usr/local/bin/tfbig-entrypoint
RUN useradd --create-home tfbig && mkdir -p /work && chown tfbig /work
ARG RUN_AS=tfbig
USER ${RUN_AS}
WORKDIR /work
EXPOSE 8080
ENTRYPOINT ["/usr/local/bin/tfbig-entrypoint"]
CMD ["tfbig"]
