import { afterAll, expect, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { cleanEnvironment } from "./environment.ts";

const dir = mkdtempSync(join(tmpdir(), "environment-"));
afterAll(() => rmSync(dir, { recursive: true }));

test("no variable stays that steers Bun", () => {
  const proxies = [
    "HTTP_PROXY",
    "http_proxy",
    "HTTPS_PROXY",
    "https_proxy",
    "ALL_PROXY",
    "all_proxy",
    "NO_PROXY",
    "no_proxy",
  ];
  const others = [
    "NODE_TLS_REJECT_UNAUTHORIZED",
    "NODE_EXTRA_CA_CERTS",
    "NODE_OPTIONS",
    "BUN_OPTIONS",
    "BUN_CONFIG_VERBOSE_FETCH",
  ];
  const foreign = Object.fromEntries([...proxies, ...others].map((name) => [name, "1"]));
  expect(
    cleanEnvironment({
      ...foreign,
      PATH: "/bin",
      TOLLGATE_PORT: "1",
      NODE_ENV: "development",
      GONE: undefined,
    }),
  ).toEqual({
    PATH: "/bin",
    TOLLGATE_PORT: "1",
    NODE_ENV: "production",
    BUN_JSC_forceRAMSize: "268435456",
    BUN_JSC_largeHeapSize: "100663296",
    BUN_JSC_thresholdForJITAfterWarmUp: "5000",
    BUN_CONFIG_DNS_TIME_TO_LIVE_SECONDS: "5",
  });
});

const SCRIPT = `
import { restartInCleanEnvironment } from ${JSON.stringify(join(import.meta.dir, "environment.ts"))};
if (process.env.STARTS_FROM === undefined) process.env.STARTS_FROM = String(process.pid);
restartInCleanEnvironment(process.env);
const worker = new Worker(URL.createObjectURL(new Blob(["postMessage(process.env.HTTP_PROXY ?? null)"])));
const inWorker = await new Promise((resolve) => { worker.onmessage = ({ data }) => resolve(data); });
const server = Bun.serve({ port: 0, fetch: () => new Response("direct") });
const answer = await fetch(server.url).then((response) => response.text());
process.on("SIGTERM", () => process.exit(7));
console.log(JSON.stringify({
  samePid: process.env.STARTS_FROM === String(process.pid),
  proxy: process.env.HTTP_PROXY ?? null,
  inWorker,
  arguments: process.argv.slice(2),
  input: await Bun.stdin.text(),
  answer,
}));
process.kill(process.pid, "SIGTERM");
`;

test("the process goes on in place, without proxies in any thread", async () => {
  writeFileSync(join(dir, "script.ts"), SCRIPT);
  writeFileSync(join(dir, ".env"), "HTTP_PROXY=http://127.0.0.1:1\n");
  const child = Bun.spawn([process.execPath, join(dir, "script.ts"), "--flag", "a b"], {
    cwd: dir,
    env: { PATH: process.env["PATH"], http_proxy: "http://127.0.0.1:1" },
    stdin: new Blob(["typed"]),
    stdout: "pipe",
    stderr: "pipe",
    timeout: 10_000,
  });
  const [printed, problems] = await Promise.all([child.stdout.text(), child.stderr.text()]);
  expect(problems).toBe("");
  expect(JSON.parse(printed)).toEqual({
    samePid: true,
    proxy: null,
    inWorker: null,
    arguments: ["--flag", "a b"],
    input: "typed",
    answer: "direct",
  });
  expect(await child.exited).toBe(7);
});
