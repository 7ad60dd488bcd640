// A newcomer who has a release and the manual: each command of its page runs, in the order of the page, on an empty machine, with
// the units as they are. At its end a call is paid for, and the doctor finds all well. And the units: nothing in them that systemd
// does not know, and as much taken from the services as they can do without.

import { afterAll, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import type { Hex } from "viem";
import { generatePrivateKey, privateKeyToAccount } from "viem/accounts";
import { wrapFetchWithPayment } from "x402-fetch";
import manifest from "../package.json" with { type: "json" };
import { makeRelease, PLATFORMS, type Platform } from "../src/packaging/release.ts";
import { startChain, type TestChain } from "./support/chain/chain.ts";
import { pages } from "./support/documentation.ts";
import { freePorts } from "./support/free-ports.ts";
import { tollgateBinary } from "./support/gateway/binary.ts";
import { startUpstream, type Upstream } from "./support/http/upstream.ts";
import { canBeRoot, type Machine, startMachine } from "./support/packaging/machine.ts";
import { parseUnit } from "./support/packaging/unit.ts";
import { startPostgres } from "./support/stores/postgres.ts";

setDefaultTimeout(120_000);

const ROOT = join(import.meta.dir, "..");
const UNITS = join(ROOT, "src/packaging/systemd");
const SERVICES = ["gateway", "facilitator"] as const;
const read = (name: string) => readFileSync(join(UNITS, name), "utf8");
const blocksOf = (info: string) => pages.get("install")?.blocks.filter((block) => block.info === info) ?? [];

describe("a unit", () => {
  test.each([...SERVICES])("of the %s takes from it what it can do without", (name) => {
    const unit = parseUnit(read(`tollgate-${name}.service`));
    expect(unit.one("User")).toBe(`tollgate-${name}`);
    expect(unit.one("ExecStart")).toBe(`/usr/local/bin/tollgate --mode ${name}`);
    expect(unit.one("StateDirectory")).toBe(`tollgate-${name}`);
    expect(unit.one("CapabilityBoundingSet")).toBe("");
    const yes =
      "NoNewPrivileges ProtectHome PrivateTmp PrivateDevices PrivateUsers ProtectKernelModules LockPersonality";
    for (const setting of yes.split(" ")) expect([setting, unit.one(setting)]).toEqual([setting, "yes"]);
    expect(unit.one("ProtectSystem")).toBe("strict");
    // Directories that everybody may write to, which systemd 252 leaves as they are once it mounts /proc anew.
    expect(unit.one("ReadOnlyPaths")).toBe("/run -/dev/shm -/dev/mqueue");
    // Longer than the drain, by the ten seconds that the manual asks for.
    expect(Number.parseInt(unit.one("TimeoutStopSec"), 10)).toBeGreaterThanOrEqual(40);
    // The engine writes machine code, and the addresses of the machine come by netlink.
    expect(unit.names).not.toContain("MemoryDenyWriteExecute");
    expect(unit.one("RestrictAddressFamilies").split(" ")).toContain("AF_NETLINK");
  });

  test("is hardened alike for both services", () => {
    const hardening = (name: string) => read(`tollgate-${name}.service`).split("# It needs its data directory")[1];
    const plain = (text = "") => text.replace(/^#.*\n/gm, "");
    expect(plain(hardening("gateway"))).toBe(plain(hardening("facilitator")));
  });

  test.skipIf(Bun.which("systemd-analyze") === null)("is one, as systemd itself judges", () => {
    const home = mkdtempSync(join(tmpdir(), "tollgate-units-"));
    const judge = (verb: string[], text: string) => {
      const path = join(home, "tollgate-judged.service");
      writeFileSync(path, text.replaceAll("/usr/local/bin/tollgate", tollgateBinary()));
      const { exitCode, stdout, stderr } = Bun.spawnSync(["systemd-analyze", ...verb, path]);
      return { exitCode, printed: `${stdout}${stderr}` };
    };
    const text = read("tollgate-gateway.service");
    expect(judge(["verify", "--man=no"], text)).toEqual({ exitCode: 0, printed: "" });
    expect(judge(["verify", "--man=no"], text.replace("PrivateTmp", "PrivatTmp")).printed).toContain("PrivatTmp");
    const { printed } = judge(["security", "--offline=true", "--no-pager"], text);
    const [exposure] = /(?<=: )\d+\.\d/.exec(printed.slice(printed.indexOf("Overall"))) ?? [];
    // The one that the manual names.
    expect(Number(exposure)).toBe(1.1);
    rmSync(home, { recursive: true, force: true });
  });
});

describe.skipIf(!canBeRoot || Bun.which("curl") === null)("whoever has the manual and an empty machine", () => {
  const platform = `linux-${process.arch}` as Platform;
  const payer = generatePrivateKey();
  const [port, mutualPort, openPort] = freePorts(3);
  const release = mkdtempSync(join(tmpdir(), "tollgate-release-"));
  let [chain, upstream, machine]: [TestChain?, Upstream?, Machine?] = [];

  beforeAll(async () => {
    chain = await startChain({ blockTimeSeconds: 1 });
    upstream = startUpstream(() => new Response("what was paid for"));
    makeRelease([platform], release, (each) => ({ target: PLATFORMS[each], path: process.execPath }));
    // Ports of this machine that are free, and the sums of the files that name them.
    for (const name of SERVICES) {
      const path = join(release, `${name}.env`);
      writeFileSync(path, localised(readFileSync(path, "utf8")));
    }
    const files = readFileSync(join(release, "SHA256SUMS"), "utf8").match(/(?<= {2}).+$/gm) ?? [];
    const sums = Bun.spawnSync(["sha256sum", ...files], { cwd: release });
    writeFileSync(join(release, "SHA256SUMS"), sums.stdout);
    machine = startMachine(release);
  });
  afterAll(async () => {
    await machine?.[Symbol.asyncDispose]();
    await Promise.all([chain?.stop(), upstream?.stop()]);
    rmSync(release, { recursive: true, force: true });
  });

  function localised(text: string): string {
    return text
      .replaceAll("8080", `${port}`)
      .replaceAll("8443", `${mutualPort}`)
      .replaceAll("8081", `${openPort}`)
      .replaceAll("linux-x64", platform)
      .replaceAll("https://base.example.com/YOUR_API_KEY", chain?.url ?? "")
      .replaceAll("https://echo.example.com/run", upstream?.url ?? "");
  }

  test("gets to a paid call, finds all well, and leaves nothing behind", async () => {
    if (chain === undefined || machine === undefined) throw new Error("it was not made");
    const signer = generatePrivateKey();
    await chain.fundEth(privateKeyToAccount(signer).address, 10n ** 18n);
    await chain.fundUsdc(privateKeyToAccount(payer).address, 1_000_000n);
    const steps = blocksOf("sh install").map(({ text }) => localised(text).replace("0xYOUR_PRIVATE_KEY", signer));
    expect(steps.length).toBe(8);
    const { code, printed } = await machine.run(`${steps.join("\n")}\necho "token: $TOKEN"\n`);
    const logs = code === 0 ? "" : (await machine.run("cat /var/log/tollgate-*")).printed;
    expect([code, printed, logs]).toEqual([0, printed, ""]);
    expect(printed).toContain(`tollgate-${manifest.version}-${platform}: OK\n`);
    const findings = printed.match(/^(ok|warn|fail) .*$/gm) ?? [];
    // The log of a chain that began a moment ago, and a disk that others fill, are no fault of the steps.
    expect(findings.filter((line) => !line.startsWith("ok"))).toEqual([]);
    expect(findings.length).toBeGreaterThan(10);

    const [token = ""] = /(?<=^token: ).+$/m.exec(printed) ?? [];
    const [agent = ""] = /(?<="id":")agt_[^"]+/.exec(printed) ?? [];
    const account = privateKeyToAccount(payer);
    const pay = wrapFetchWithPayment(fetch, account as never);
    const headers = { authorization: `Bearer ${token}`, prefer: "wait=30" };
    const call = { method: "POST", headers, body: "please" };
    const answer = await pay(`http://127.0.0.1:${port}/v1/proxy/${agent}`, call);
    expect([answer.status, answer.headers.has("x-payment-response")]).toEqual([202, true]);
    const { invocation_id } = (await answer.json()) as { invocation_id: string };
    const polled = await fetch(`http://127.0.0.1:${port}/v1/proxy/${agent}/invocations/${invocation_id}`, { headers });
    expect(await polled.json()).toMatchObject({
      status: "succeeded",
      response_body_b64: btoa("what was paid for"),
      settlement: {
        status: "settled",
        settled_amount: "10000",
        tx_hash: expect.stringMatching(/^0x/) as unknown as Hex,
      },
    });

    const url = await (await startPostgres()).emptyDatabase();
    const moved = blocksOf("sh postgres").map(({ text }) =>
      text.replace("postgres://gateway:YOUR_PASSWORD@db.example.com:5432/gateway", url),
    );
    expect(moved.length).toBe(2);
    const ready = `curl --silent --fail --retry 60 --retry-all-errors --retry-delay 1 http://127.0.0.1:${port}/readyz`;
    const onPostgres = await machine.run([moved[0], ready, moved[1]].join("\n"));
    expect([onPostgres.code, onPostgres.printed]).toEqual([0, onPostgres.printed]);
    expect(onPostgres.printed).toMatch(/^ok {4}database +Postgres 18/m);
    expect(onPostgres.printed).not.toMatch(/^(warn|fail) /m);

    const removed = await machine.run(blocksOf("sh uninstall")[0]?.text ?? "exit 1");
    expect(removed).toEqual({ code: 0, printed: "" });
    const left = await machine.run(
      "cat /var/log/tollgate-*.log; ls /var/lib /etc/systemd/system /etc; id tollgate-gateway || true",
    );
    // The gateway once more, when it was moved.
    expect(left.printed.match(/"event":"stopped"/g)?.length).toBe(3);
    // Those logs are for programs: the welcome of the first start is for a terminal.
    expect(left.printed).not.toContain("First start");
    expect(left.printed).toContain("no such user");
    expect(left.printed).not.toMatch(/^tollgate/m);
  });
});
