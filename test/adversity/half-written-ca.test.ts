// A file with two CAs that is being written anew: what is there of it for a while is not taken for the whole.

import { afterAll, beforeAll, expect, test } from "bun:test";
import { readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { startChain, type TestChain } from "../support/chain/chain.ts";
import { type Client, type Facilitator, startFacilitator } from "../support/chain/facilitator.ts";
import { until } from "../support/until.ts";

let chain: TestChain;
let facilitator: Facilitator;
beforeAll(async () => {
  chain = await startChain();
  facilitator = await startFacilitator(chain);
});
afterAll(async () => {
  await facilitator?.[Symbol.asyncDispose]();
  await chain?.stop();
});

test("clients of the second CA go on while the file of both has its second half missing", async () => {
  const pki = join(dirname(facilitator.dataDir), "pki");
  const second = join(dirname(pki), "pki-2");
  const tollgate = async (...args: string[]) => expect((await facilitator.run(...args)).code).toBe(0);
  await tollgate("pki", "init", "--dir", second);
  await tollgate("pki", "client", "--dir", second, "--name", "late");
  await tollgate("account", "add-cert", "gateway", "--cert", join(second, "late.crt"));
  const read = (dir: string, file: string) => readFileSync(join(dir, file), "utf8");
  const both = read(pki, "ca.crt") + read(second, "ca.crt");
  writeFileSync(join(pki, "ca.crt"), both);
  const late: Client = {
    name: "late",
    cert: read(second, "late.crt"),
    key: read(second, "late.key"),
    bundle: "",
    ca: both,
  };
  const status = () =>
    facilitator.settle({}, late).then(
      (answer) => answer.status,
      () => "refused",
    );
  await until(async () => (await status()) === 400);
  const open = await facilitator.connect(late);
  expect((await open.settle({})).status).toBe(400);

  const told = () => facilitator.lines().filter(({ event }) => `${event}`.startsWith("tls_files_")).length;
  const before = told();
  writeFileSync(join(pki, "ca.crt"), both.slice(0, -200));
  await until(() => told() > before);
  expect([
    await status(),
    await open.settle({}).then(
      ({ status }) => status,
      () => "closed",
    ),
  ]).toEqual([400, 400]);
  open.close();
});
