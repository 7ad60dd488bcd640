# Made in one stage, and alone in the other. Everything that goes in is pinned: the images by tag and digest (as
# docker-library/repo-info lists them), Bun and the packages by the hashes in their lock files. No install script runs.
# The binary is byte for byte the one of the release.
FROM node:24.19.0-bookworm-slim@sha256:cd84903a12dbd26b46f1f3b8144a2568c41c5d37ddd0c7a80a34c7a19786b35f AS build
WORKDIR /build/src/packaging/runtimes
COPY src/packaging/runtimes/package.json src/packaging/runtimes/package-lock.json ./
# Of all the platforms in the lock, npm takes the one that it runs on.
RUN npm ci --ignore-scripts --no-audit --no-fund && ln -s "$PWD"/node_modules/@oven/bun-linux-*/bin/bun /usr/local/bin/bun
WORKDIR /build
COPY package.json bun.lock bunfig.toml ./
RUN bun install --frozen-lockfile --production --omit=peer --omit=optional --ignore-scripts
COPY . .
# `docker build --build-arg COMMIT=$(git rev-parse --short=12 HEAD) .` lets /version name the commit.
ARG COMMIT=""
RUN TOLLGATE_COMMIT="$COMMIT" bun run build

FROM debian:bookworm-20260918-slim@sha256:3783cc01769c7b2b1b83a5c5ad96c815348e28ed7da68e2e3687004faa906251
ARG COMMIT=""
LABEL org.opencontainers.image.title="tollgate" \
  org.opencontainers.image.description="A multi-tenant gateway for agents, and the x402 settlement facilitator beside it." \
  org.opencontainers.image.version="0.1.0" \
  org.opencontainers.image.revision="$COMMIT" \
  org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /build/dist/tollgate /usr/local/bin/tollgate
COPY --chmod=0755 src/packaging/healthcheck /usr/local/bin/tollgate-healthcheck
COPY --from=build /build/dist/licences.txt /usr/share/doc/tollgate/licences.txt
RUN install -d -m 0700 -o 65532 -g 65532 /data
USER 65532:65532
WORKDIR /data
ENV TOLLGATE_HOST=0.0.0.0 TOLLGATE_DATA_DIR=/data
# The only place that is written to: the rest may be read-only, and no /tmp is needed.
VOLUME /data
# The gateway's port; the facilitator's with mutual TLS, and its plain one.
EXPOSE 8080 8443 8081
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s CMD ["tollgate-healthcheck"]
# Running calls may finish for TOLLGATE_DRAIN_MS. Whoever stops the container has to wait longer than that: `--stop-timeout 45`.
STOPSIGNAL SIGTERM
ENTRYPOINT ["tollgate"]
CMD ["--mode", "gateway"]
