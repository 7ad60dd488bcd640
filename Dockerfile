# Two stages: the binary is built with the pinned Bun on a plain Node image, and runs alone on a small Debian.
FROM node:22-bookworm-slim AS build
WORKDIR /build
COPY package.json bun.lock bunfig.toml ./
RUN npx --yes bun@1.4.5 install --frozen-lockfile --production --ignore-scripts
COPY . .
# `docker build --build-arg COMMIT=$(git rev-parse --short=12 HEAD) .` lets /version name the commit.
ARG COMMIT=""
RUN TOLLGATE_COMMIT="$COMMIT" npx --yes bun@1.4.5 run build

FROM debian:bookworm-slim
COPY --from=build /build/dist/tollgate /usr/local/bin/tollgate
COPY LICENSE /usr/share/doc/tollgate/LICENSE
RUN install -d -m 0700 -o 65532 -g 65532 /data
USER 65532:65532
WORKDIR /data
ENV TOLLGATE_HOST=0.0.0.0 TOLLGATE_DATA_DIR=/data
VOLUME /data
# The gateway's port; the facilitator's with mutual TLS, and its plain one.
EXPOSE 8080 8443 8081
# The image has no HTTP client; bash opens the connection itself, to the port that either wing has open. Liveness
# only, so any answer will do: a database or a chain that is away is no reason to kill the container.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s CMD ["bash", "-c", \
  "for port in ${TOLLGATE_OPEN_PORT:-8081} ${TOLLGATE_PORT:-8080}; do exec 3<>/dev/tcp/127.0.0.1/$port && printf 'GET /healthz HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n' >&3 && read -r version _ <&3 && [ \"$version\" = HTTP/1.1 ] && exit 0; done 2>/dev/null; exit 1"]
ENTRYPOINT ["tollgate"]
CMD ["--mode", "gateway"]
