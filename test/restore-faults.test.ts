// A restore that fails or is killed at any step leaves the old database or the new one, whole, and loses neither. strace makes
// system calls fail, and kills the command at them.
import { Database } from "bun:sqlite";
import { afterAll, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import { cpSync, existsSync, mkdtempSync, readdirSync, rmSync } from "node:fs";
import { join } from "node:path";
import { ask } from "./support/gateway/api.ts";
import { tollgateBinary } from "./support/gateway/binary.ts";
import { startGateway } from "./support/gateway/gateway.ts";
import { runCommand, temporaryRoot } from "./support/gateway/process.ts";

setDefaultTimeout(120_000);

const LINKS = "link,linkat";
const RENAMES = "rename,renameat,renameat2";
const [AGENTS_OF_COPY, AGENTS_OF_OLD] = [1, 3];

const strace = Bun.which("strace");

describe.skipIf(strace === null)("where system calls fail", () => {
  let dir: string;
  /** A data directory whose gateway was killed, so that most of it is in the write-ahead log. */
  const killed = () => join(dir, "killed");
  const copy = () => join(dir, "copy.db");
  beforeAll(async () => {
    dir = mkdtempSync(join(temporaryRoot(), "restore-faults-"));
    await using gateway = await startGateway();
    const token = await gateway.token({ tenant: "acme", user: "alice" });
    const add = async (name: string) => expect((await ask(gateway, token, "/v1/agents", { name })).status).toBe(201);
    await add("first");
    expect(await gateway.run("backup", copy())).toMatchObject({ code: 0 });
    await add("second");
    await add("third");
    await gateway.kill9();
    cpSync(gateway.dataDir, killed(), { recursive: true });
  });
  afterAll(() => rmSync(dir, { recursive: true, force: true }));

  function agentsIn(file: string): number {
    using database = new Database(file, { readwrite: true, create: false });
    expect(database.query("pragma integrity_check").get()).toEqual({ integrity_check: "ok" });
    return (database.query("select count(*) as agents from agents").get() as { agents: number }).agents;
  }

  /** Runs a command while system calls fail. @returns its outcome, and what is in the data directory then */
  async function under(inject: string, command: string, file = copy()) {
    const data = mkdtempSync(join(dir, "data-"));
    cpSync(killed(), data, { recursive: true });
    const calls = `trace=${inject.split(":")[0]}`;
    const traced = [strace ?? "", ...["-f", "-qq", "-o", join(data, "trace"), "-e", calls, "-e", `inject=${inject}`]];
    const env = { TOLLGATE_DATA_DIR: data };
    const done = await runCommand([command, file], { cwd: dir, env, program: [...traced, tollgateBinary()] });
    const names = readdirSync(data).filter((name) => /^tollgate\.db/.test(name) && !/-(wal|shm)$/.test(name));
    const kept = names.filter((name) => /\.before-\d+$/.test(name));
    const path = join(data, "tollgate.db");
    return { ...done, data, names, kept: kept.map((name) => agentsIn(join(data, name))), path };
  }

  test.each([
    ["EPERM", "restore"],
    ["EOPNOTSUPP", "restore"],
  ])("a restore works without hard links (%s)", async (error) => {
    const { code, kept, names, path } = await under(`${LINKS}:error=${error}`, "restore");
    expect(code).toBe(0);
    expect([agentsIn(path), kept]).toEqual([AGENTS_OF_COPY, [AGENTS_OF_OLD]]);
    expect(names).toHaveLength(2);
  });

  test("a backup works without hard links, and still replaces no file", async () => {
    const file = join(dir, "no-links.db");
    const inject = `${LINKS}:error=EPERM`;
    expect(await under(inject, "backup", file)).toMatchObject({ code: 0, stdout: `wrote ${file}\n` });
    expect(agentsIn(file)).toBe(AGENTS_OF_OLD);
    expect((await under(inject, "backup", file)).code).toBe(2);
    const failing = join(dir, "failing.db");
    expect((await under(`${LINKS},${RENAMES}:error=EPERM`, "backup", failing)).code).toBe(2);
    expect(readdirSync(dir).filter((name) => name.startsWith("failing"))).toEqual([]);
  });

  test("a restore that fails at the last step changes nothing and says so", async () => {
    for (const calls of [RENAMES, `${LINKS},${RENAMES}`]) {
      const { code, stderr, names, path } = await under(`${calls}:error=EPERM`, "restore");
      expect([code, stderr]).toEqual([
        2,
        expect.stringContaining("can't be put in its place, and nothing was changed"),
      ]);
      expect([agentsIn(path), names]).toEqual([AGENTS_OF_OLD, ["tollgate.db"]]);
    }
  });

  test("a restore that fails or is killed at any step leaves one of the two databases, and the other one is not lost", async () => {
    const faults = [LINKS, RENAMES, "fsync,fdatasync", "unlink,unlinkat"].map((calls) => `${calls}:signal=KILL`);
    let olds = 0;
    for (const fault of [...faults, "fsync,fdatasync:error=EIO"]) {
      for (let nth = 1, isOld = true; isOld; nth++) {
        const { code, kept, path } = await under(`${fault}:when=${nth}`, "restore");
        const agents = existsSync(path) ? agentsIn(path) : 0;
        isOld = agents === AGENTS_OF_OLD && code !== 0;
        if (isOld) olds++;
        else expect([fault, nth, agents, kept]).toEqual([fault, nth, AGENTS_OF_COPY, [AGENTS_OF_OLD]]);
      }
    }
    expect(olds).toBeGreaterThan(8);
  });
});
