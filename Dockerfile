# The binary is built in one stage and runs alone in the other. All that they start from is pinned: the base by its tag
# and digest (as docker-library/repo-info lists it), Bun by the hash of its npm package, packages by bun.lock. No
# install script of any of them runs.
FROM debian:bookworm-20260918-slim@sha256:3783cc01769c7b2b1b83a5c5ad96c815348e28ed7da68e2e3687004faa906251 AS base

FROM base AS bun-amd64
ADD --checksum=sha256:0c72edca57b0cbf0a07a242daf0ea8ea96711827f042b80a1c383ce1cc51c771 \
  https://registry.npmjs.org/@oven/bun-linux-x64/-/bun-linux-x64-1.4.5.tgz /bun.tgz

FROM base AS bun-arm64
ADD --checksum=sha256:c3cd56594c9d5d025df87f77c68ad4699a49b52551f0f3232be6f727533fe08c \
  https://registry.npmjs.org/@oven/bun-linux-aarch64/-/bun-linux-aarch64-1.4.5.tgz /bun.tgz

FROM bun-${TARGETARCH} AS build
RUN tar -xzf /bun.tgz -C /usr/local/bin --strip-components=2 package/bin/bun
WORKDIR /build
COPY package.json bun.lock bunfig.toml ./
RUN bun install --frozen-lockfile --production --omit=peer --omit=optional --ignore-scripts
COPY . .
# `docker build --build-arg COMMIT=$(git rev-parse --short=12 HEAD) .` lets /version name the commit.
ARG COMMIT=""
RUN TOLLGATE_COMMIT="$COMMIT" bun run build

FROM base
COPY --from=build /build/dist/tollgate /usr/local/bin/tollgate
COPY LICENSE /usr/share/doc/tollgate/LICENSE
RUN install -d -m 0700 -o 65532 -g 65532 /data
USER 65532:65532
WORKDIR /data
ENV TOLLGATE_HOST=0.0.0.0 TOLLGATE_DATA_DIR=/data
VOLUME /data
# The gateway's port; the facilitator's with mutual TLS, and its plain one.
EXPOSE 8080 8443 8081
# The image has no HTTP client; bash opens the connection itself, to the port that either service has open. Liveness
# only, so any answer will do: a database or a chain that is away is no reason to kill the container.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s CMD ["bash", "-c", \
  "for port in ${TOLLGATE_OPEN_PORT:-8081} ${TOLLGATE_PORT:-8080}; do exec 3<>/dev/tcp/127.0.0.1/$port && printf 'GET /healthz HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n' >&3 && read -r version _ <&3 && [ \"$version\" = HTTP/1.1 ] && exit 0; done 2>/dev/null; exit 1"]
ENTRYPOINT ["tollgate"]
CMD ["--mode", "gateway"]
