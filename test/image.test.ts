// The container image without an engine: what its Dockerfile says, and the binary in a bare, read-only root as it says, in
// both modes, up to a proper end.

import { describe, expect, test } from "bun:test";
import { readFileSync, statSync } from "node:fs";
import { join } from "node:path";
import manifest from "../package.json" with { type: "json" };
import { freePorts } from "./support/free-ports.ts";
import { runCommand, type Service, startService } from "./support/gateway/process.ts";
import { startUpstream } from "./support/http/upstream.ts";
import { bareRoot, execute, hasNamespaces, insidePid } from "./support/packaging/bare-root.ts";
import { readImage } from "./support/packaging/image.ts";

const ROOT = join(import.meta.dir, "..");
const image = readImage();
const HEALTH_CHECK = "/usr/local/bin/tollgate-healthcheck";
const PATH = "/usr/local/bin:/bin";

describe("the Dockerfile", () => {
  test("starts from full versions with their digests", () => {
    expect(image.froms).toEqual([
      expect.stringMatching(/^node:\d+\.\d+\.\d+-bookworm-slim@sha256:[0-9a-f]{64}$/),
      expect.stringMatching(/^debian:bookworm-\d{8}-slim@sha256:[0-9a-f]{64}$/),
    ]);
  });

  test("installs the Bun of the manifest by its hash, and the packages that the start installs", () => {
    const { packages } = JSON.parse(readFileSync(join(ROOT, "src/packaging/runtimes/package-lock.json"), "utf8")) as {
      packages: Record<string, { version?: string; integrity?: string }>;
    };
    const { "": top, ...runtimes } = packages;
    expect(top).toEqual(JSON.parse(readFileSync(join(ROOT, "src/packaging/runtimes/package.json"), "utf8")));
    for (const { version, integrity } of Object.values(runtimes)) {
      expect([version, integrity]).toEqual([manifest.engines.bun, expect.stringMatching(/^sha512-/)]);
    }
    expect(Object.keys(runtimes).length).toBe(6);
    const [install = ""] = manifest.scripts.start.split(" && ");
    expect(image.runs).toContain(install);
    for (const run of image.runs) if (/ (ci|install) /.test(run)) expect(run).toMatch(/--ignore-scripts|^install -d/);
  });

  test("names no host that packages come from", () => {
    expect(readFileSync(join(ROOT, "Dockerfile"), "utf8").match(/https?:\/\/\S+/g)).toBeNull();
  });

  test("runs as nobody, keeps data in one place, and says what it is", () => {
    expect(image).toMatchObject({ user: "65532:65532", workdir: "/data", volumes: ["/data"], stopSignal: "SIGTERM" });
    expect(image.ports).toEqual(["8080", "8443", "8081"]);
    expect(image.labels).toMatchObject({
      "org.opencontainers.image.title": manifest.name,
      "org.opencontainers.image.version": manifest.version,
      "org.opencontainers.image.description": manifest.description,
      "org.opencontainers.image.licenses": manifest.license,
    });
    expect(statSync(join(ROOT, "src/packaging/healthcheck")).mode & 0o111).toBe(0o111);
  });
});

describe.skipIf(!hasNamespaces)("in a bare, read-only root", () => {
  const root = () => bareRoot({ [HEALTH_CHECK]: join(ROOT, "src/packaging/healthcheck") });
  const [, port, openPort] = [0, ...freePorts(2)];

  /** As a container engine starts it, with these words behind the image's name. */
  function run(inside: ReturnType<typeof bareRoot>, env: Record<string, string>, args: readonly string[]) {
    const [user = ""] = image.user.split(":");
    const program = [...inside.enter(user), ...image.entrypoint];
    return startService({ args, cwd: inside.data, env: { PATH, ...image.env, ...env }, log: [], program });
  }

  async function end(service: Service): Promise<number> {
    process.kill(insidePid(service.pid), image.stopSignal as NodeJS.Signals);
    return service.end("SIGTERM");
  }

  test("the gateway makes a call, is found healthy, and drains", async () => {
    using inside = root();
    const { promise: answer, resolve: release } = Promise.withResolvers<void>();
    const { promise: asked, resolve: arrived } = Promise.withResolvers<void>();
    const upstream = startUpstream(async (request) => {
      if (request.headers.get("content-type") === "text/slow") {
        arrived();
        await answer;
      }
      return new Response("from upstream");
    });
    const env = { ...image.env, PATH, TOLLGATE_ALLOW_HOSTS: "127.0.0.1" };
    const service = await run(inside, env, [...image.command, "--port", `${port}`]);
    const pid = insidePid(service.pid);
    const url = `http://127.0.0.1:${port}`;
    expect(readFileSync(`/proc/${pid}/status`, "utf8")).toMatch(/^NSpid:.*\t1$/m);
    expect(readFileSync(`/proc/${pid}/status`, "utf8")).toMatch(/^CapEff:\t0+$/m);
    const writable = readFileSync(`/proc/${pid}/mountinfo`, "utf8")
      .split("\n")
      .flatMap((line) => /^\S+ \S+ \S+ \S+ (\S+) rw/.exec(line)?.[1] ?? []);
    expect(writable).toEqual(["/data", "/dev/null"]);

    const minted = await execute(pid, env, ["tollgate", "token", "--tenant", "acme", "--user", "me"]);
    expect(minted).toMatchObject({ code: 0, stderr: "" });
    const headers = { authorization: `Bearer ${minted.stdout.trim()}`, "content-type": "application/json" };
    const ask = async (path: string, body: string, more = {}) =>
      (await fetch(url + path, { method: "POST", headers: { ...headers, ...more }, body })).json();
    const agent = (await ask("/v1/agents", JSON.stringify({ name: "up", upstream_url: upstream.url }))) as {
      id: string;
    };
    const call = (await ask(`/v1/proxy/${agent.id}`, "{}", { prefer: "wait=30" })) as { invocation_id: string };
    const poll = async (id: string) =>
      (await (await fetch(`${url}/v1/proxy/${agent.id}/invocations/${id}`, { headers })).json()) as object;
    expect(await poll(call.invocation_id)).toMatchObject({
      status: "succeeded",
      response_body_b64: btoa("from upstream"),
    });

    expect(await execute(pid, env, image.healthCheck)).toMatchObject({ code: 0 });
    // Of a process without flags it asks the variable's port, where nobody is.
    const elsewhere = { ...env, TOLLGATE_PORT: `${openPort}` };
    expect((await execute(pid, elsewhere, [...image.healthCheck, "/dev/null"])).code).not.toBe(0);

    await ask(`/v1/proxy/${agent.id}`, "{}", { "content-type": "text/slow" });
    await asked;
    const ended = end(service);
    release();
    expect(await ended).toBe(0);
    await upstream.stop();
  });

  test("the facilitator starts with flags, and the health check finds the port that they lead to", async () => {
    using inside = root();
    const [user = ""] = image.user.split(":");
    const surroundings = {
      cwd: inside.data,
      env: { PATH, ...image.env },
      program: [...inside.enter(user), "tollgate"],
    };
    for (const words of ["init", "server --host 127.0.0.1"]) {
      const [command = "", ...flags] = words.split(" ");
      expect(await runCommand(["pki", command, "--dir", "/data/pki", ...flags], surroundings)).toMatchObject({
        code: 0,
      });
    }
    const env = {
      TOLLGATE_OPEN_PORT: `${openPort}`,
      TOLLGATE_TLS_CERT_FILE: "pki/server.crt",
      TOLLGATE_TLS_KEY_FILE: "pki/server.key",
      TOLLGATE_CLIENT_CA_FILE: "pki/ca.crt",
      // Nobody answers there: it is alive, and not ready.
      TOLLGATE_RPC_URLS: "http://127.0.0.1:1",
      TOLLGATE_SIGNER_KEY: "5d".repeat(32),
    };
    const service = await run(inside, env, ["--mode", "facilitator", `--port=${port}`]);
    const pid = insidePid(service.pid);
    expect((await fetch(`http://127.0.0.1:${openPort}/healthz`)).status).toBe(503);
    expect(await execute(pid, { PATH, ...image.env, ...env }, image.healthCheck)).toMatchObject({ code: 0 });
    expect(await end(service)).toBe(0);
  });
});
