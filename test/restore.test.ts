// Restore drills: a gateway, or a facilitator, whose database is set back to a copy while the other goes on. What was
// acknowledged before the copy is there; no payment buys two calls, no call is made twice, and no payment that landed is
// told as failed. The copies are made as an operator makes them: by `tollgate backup`, and by pg_dump.

import { afterAll, beforeAll, describe, expect, setDefaultTimeout, test } from "bun:test";
import {
  chownSync,
  copyFileSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  writeFileSync,
} from "node:fs";
import { join } from "node:path";
import { generatePrivateKey, privateKeyToAccount } from "viem/accounts";
import { startChain } from "./support/chain/chain.ts";
import { startFacilitator } from "./support/chain/facilitator.ts";
import { newPayer, signPayment } from "./support/chain/payments.ts";
import { tollgateBinary } from "./support/gateway/binary.ts";
import { startGateway } from "./support/gateway/gateway.ts";
import { type Environment, runCommand, temporaryRoot } from "./support/gateway/process.ts";
import { startRelay } from "./support/http/relay.ts";
import { newMasterKey } from "./support/keys.ts";
import { scrape } from "./support/metrics.ts";
import { expectServed, PRICE, type Services, startServices } from "./support/stores/paid-calls.ts";
import { missingPostgres, startPostgres } from "./support/stores/postgres.ts";
import { until } from "./support/until.ts";

setDefaultTimeout(150_000);

/** As src/gateway/payment/restored.ts has it. */
const [LONGEST_SECONDS, DEMANDED_SECONDS] = [840, 780];
const seconds = () => Math.floor(Date.now() / 1000);

let dir: string;
beforeAll(() => {
  dir = mkdtempSync(join(temporaryRoot(), "restore-"));
});
afterAll(() => rmSync(dir, { recursive: true, force: true }));

interface Drill {
  readonly env: Environment;
  copy(services: Services): Promise<void>;
  /** Puts the copy in the place of the database, and gives what the gateway's environment must be then. */
  restore(services: Services): Promise<Environment>;
}

async function onSqlite(): Promise<Drill> {
  const file = join(dir, "gateway.db");
  return {
    env: {},
    async copy({ gateway }) {
      expect(await gateway.run("backup", file, "--verify")).toMatchObject({ code: 0 });
    },
    async restore({ gateway }) {
      const restored = await gateway.run("restore", file);
      expect(restored).toMatchObject({ code: 0, stdout: expect.stringContaining("marked as restored") });
      // What was there is kept, and the copy is still good for another time.
      expect(readdirSync(gateway.dataDir).filter((name) => /^tollgate\.db\.before-\d+$/.test(name))).toHaveLength(1);
      return {};
    },
  };
}

async function onPostgres(): Promise<Drill> {
  const server = await startPostgres(15);
  const [live, again] = [await server.freshDatabase(), await server.emptyDatabase()];
  const dump = join(dir, "gateway.dump");
  const tool = async (...command: string[]) => {
    const { exitCode, stderr } = Bun.spawnSync(
      command.map((word) => word.replace(/^@/, "/usr/lib/postgresql/15/bin/")),
    );
    expect([exitCode, exitCode === 0 ? "" : stderr.toString()]).toEqual([0, ""]);
  };
  const masterKey = newMasterKey();
  return {
    env: { DATABASE_URL: live, TOLLGATE_MASTER_KEY: masterKey },
    copy: () => tool("@pg_dump", "-Fc", "-f", dump, live),
    async restore() {
      await tool("@pg_restore", "--no-owner", "-d", again, dump);
      const env = { DATABASE_URL: again, TOLLGATE_MASTER_KEY: masterKey };
      const restored = () => runCommand(["restore"], { cwd: dir, env });
      // By the copy the gateway runs; fifteen seconds later it would not.
      expect(await restored()).toMatchObject({ code: 2, stderr: expect.stringContaining("must be stopped") });
      await using client = new Bun.SQL(again, { max: 1 });
      await client.unsafe("delete from processes");
      expect(await restored()).toMatchObject({
        code: 0,
        stdout: expect.stringContaining("marked as restored"),
      });
      return env;
    },
  };
}

describe.each([
  ["sqlite", onSqlite, null],
  ["postgres", onPostgres, missingPostgres(15)],
] as const)("on %s", (_, begin, missing) => {
  test.concurrent.skipIf(missing !== null)(
    "a gateway set back makes no call twice, and no payment buys two",
    async () => {
      const drill = await begin();
      await using services = await startServices({ gatewayEnv: { ...drill.env, TOLLGATE_AGENT_CONCURRENCY: "1" } });
      const { chain, gateway, upstream } = services;
      const [agent, busy] = [await services.open(), await services.open()];
      const before = await agent.call();
      const first = await before.send();
      await before.ended(first.body.invocation_id);
      // One that runs and one that waits for it, both paid.
      const [running, waiting] = [await busy.call(), await busy.call()];
      upstream.hold(running.nonce);
      const [run, wait] = [await running.send(), await waiting.send()];
      await upstream.visited(running.nonce);
      await drill.copy(services);

      // What the copy knows nothing of.
      const since = await agent.call();
      const forgotten = await since.send();
      await since.ended(forgotten.body.invocation_id);
      expect(
        (await busy.tenant.send("POST", `/v1/proxy/${busy.id}/invocations/${run.body.invocation_id}/cancel`)).status,
      ).toBe(200);
      await upstream.visited(waiting.nonce);
      await waiting.ended(wait.body.invocation_id);
      await gateway.kill9();
      const env = await drill.restore(services);
      await gateway.restart(env);

      expect(await before.look(first.body.invocation_id)).toMatchObject({ status: "succeeded" });
      expect((await before.send()).body.invocation_id).toBe(first.body.invocation_id);
      for (const [call, { body }] of [
        [running, run],
        [waiting, wait],
      ] as const) {
        expect(await call.ended(body.invocation_id)).toMatchObject({
          status: "failed",
          error_class: "internal",
          settlement: { status: "settled_upstream_failed" },
        });
      }
      expect(await since.send()).toMatchObject({ status: 402, body: { error: "the payment could not be verified" } });
      expect((await agent.tenant.send("POST", `/v1/proxy/${agent.id}`, {})).body.accepts[0].maxTimeoutSeconds).toBe(
        DEMANDED_SECONDS,
      );
      for (const call of [before, since, running, waiting]) expect(upstream.of(call.nonce)).toHaveLength(1);

      // One that ends late enough is certainly new, also after another restart.
      await gateway.stop();
      await gateway.restart();
      const isTaken = async () => {
        const call = await agent.call({ validBefore: seconds() + LONGEST_SECONDS - 1 });
        const answer = await call.send();
        return answer.status === 202 ? { call, id: answer.body.invocation_id as string } : null;
      };
      let taken = await isTaken();
      while (taken === null) taken = await isTaken();
      await expectServed(services, taken.call, taken.id);
      expect(await chain.transfers({ nonce: since.nonce })).toHaveLength(1);
    },
  );
});

test.concurrent("a facilitator set back pays nothing twice, and calls what its own wallet has moved collected", async () => {
  await using services = await startServices({ facilitatorEnv: { TOLLGATE_METRICS_PORT: "0" } });
  const { chain, facilitator } = services;
  const payer = newPayer();
  await chain.fundUsdc(payer.address, 10n * PRICE);
  const to = newPayer().address;
  const signed = (validBefore = seconds() + 300) => signPayment(payer, { to, value: PRICE, validBefore });
  const settled = async (payment: Awaited<ReturnType<typeof signed>>) => {
    const { body } = await facilitator.settle(payment.settleRequest);
    expect(body).toMatchObject({ success: true });
    return body.transaction as string;
  };
  const known = await signed();
  const knownHash = await settled(known);
  const file = join(dir, "facilitator.db");
  expect(await facilitator.run("backup", file, "--verify")).toMatchObject({ code: 0 });

  const [short, long] = [await signed(seconds() + 9), await signed()];
  const hashes = [await settled(short), await settled(long)];
  // Of somebody else, and of nobody.
  const foreign = await signed();
  await chain.collectAsStranger(foreign);
  await facilitator.kill9();
  expect(await facilitator.run("restore", file)).toMatchObject({
    code: 0,
    stdout: expect.stringMatching(/ is marked as restored\nchanges .* are lost: disable accounts again \(see /),
  });
  await facilitator.restart();

  expect(facilitator.payment(long.authorization.nonce)).toBeNull();
  expect(await settled(known)).toBe(knownHash);
  expect([await settled(short), await settled(long)]).toEqual(hashes);
  const counted = async () => (await scrape(facilitator)).value("tollgate_settlements_total", { outcome: "settled" });
  expect(await counted()).toBe(2);
  await until(() => seconds() >= Number(short.authorization.validBefore) + 2);
  await chain.mine(1);
  expect(await settled(short)).toBe(hashes[0] ?? "");
  expect(await counted()).toBe(2);
  expect((await facilitator.settle(foreign.settleRequest)).body).toMatchObject({ success: false, transaction: "" });
  // All of an authorization stands on the chain. Without its signature it is worth nothing.
  const { validAfter, validBefore, nonce } = long.authorization;
  const window = { validAfter: Number(validAfter), validBefore: Number(validBefore) };
  const copied = await signPayment(newPayer(), { ...window, to, value: PRICE, nonce, from: payer.address });
  expect((await facilitator.settle(copied.settleRequest)).body).toMatchObject({ success: false });
  // Its nonces go on.
  await settled(await signed());
  await settled(await signed());
  for (const { authorization } of [known, short, long]) {
    expect(await chain.transfers({ nonce: authorization.nonce })).toHaveLength(1);
  }
  expect(await chain.transfers({ from: payer.address })).toHaveLength(6);
  expect(facilitator.lines("forgotten_payment_found")).not.toEqual([]);
});

test.concurrent("a database is not taken for restored beside a facilitator that runs on it, which would not learn of it", async () => {
  const chain = await startChain();
  try {
    const env = { DATABASE_URL: await (await startPostgres()).freshDatabase() };
    await using facilitator = await startFacilitator(chain, { env });
    expect(await facilitator.run("restore")).toMatchObject({
      code: 2,
      stderr: expect.stringContaining("must be stopped"),
    });
    await facilitator.stop();
    expect(await facilitator.run("restore")).toMatchObject({ code: 0 });
  } finally {
    await chain.stop();
  }
});

test.concurrent("what another facilitator's wallet has moved is told as collected after a restore by one that has no key of it", async () => {
  const chain = await startChain();
  try {
    const database = await (await startPostgres()).freshDatabase();
    await using one = await startFacilitator(chain, { env: { DATABASE_URL: database } });
    const key = generatePrivateKey();
    await chain.fundEth(privateKeyToAccount(key).address, 10n ** 19n);
    await using other = await startFacilitator(chain, { beside: one, env: { TOLLGATE_SIGNER_KEY: key } });
    const payer = newPayer();
    await chain.fundUsdc(payer.address, PRICE);
    const { settleRequest } = await signPayment(payer, { to: newPayer().address, value: PRICE });
    const { body } = await other.settle(settleRequest);
    expect(body).toMatchObject({ success: true });
    await one.stop();
    await other.stop();
    await using client = new Bun.SQL(database, { max: 1 });
    await client.unsafe("truncate facilitator_payments, facilitator_transactions");
    expect(await one.run("restore")).toMatchObject({ code: 0 });
    await one.restart();
    expect((await one.settle(settleRequest)).body).toEqual(body);
  } finally {
    await chain.stop();
  }
});

test.concurrent("a gateway that was not stopped while its server was away is noticed when it comes back", async () => {
  const direct = await (await startPostgres()).freshDatabase();
  const door = startRelay(Number(new URL(direct).port));
  const through = direct.replace(/:\d+\//, `:${door.port}/`);
  const masterKey = Buffer.from(crypto.getRandomValues(new Uint8Array(32))).toString("base64");
  const env = { DATABASE_URL: through, TOLLGATE_MASTER_KEY: masterKey };
  await using gateway = await startGateway({ env });
  await using client = new Bun.SQL(direct, { max: 1 });
  door.refuse();
  // As a copy of an hour ago has it.
  await client.unsafe("update processes set lease_until = lease_until - 3600000");
  const restoring = runCommand(["restore"], { cwd: dir, env: { ...env, DATABASE_URL: direct } });
  await until(async () => (await client.unsafe("select 1 from restoration")).length !== 0);
  door.restore();
  expect(await restoring).toMatchObject({ code: 2, stderr: expect.stringContaining("must be stopped") });
  await gateway.stop();
  // Nothing starts before it has been done.
  expect(await gateway.restart().catch((error) => String(error))).toContain("tollgate restore must be run again");
  door.stop();
});

test.concurrent("after a restore a payment that can't be collected now is not told as failed while what was forgotten may land", async () => {
  await using services = await startServices({ facilitatorEnv: { TOLLGATE_INCLUSION_TIMEOUT_MS: "1000" } });
  const { chain, facilitator } = services;
  const payer = newPayer();
  await chain.fundUsdc(payer.address, PRICE);
  const file = join(dir, "in-flight.db");
  expect(await facilitator.run("backup", file)).toMatchObject({ code: 0 });
  const payment = await signPayment(payer, { to: newPayer().address, value: PRICE });
  const { nonce } = payment.authorization;
  await chain.pauseMining();
  expect((await facilitator.settle(payment.settleRequest)).body).toMatchObject({ success: false });
  const [sent] = facilitator.transactions();
  // It is on its way, with nodes that this one does not hear of.
  await chain.rpc("anvil_dropTransaction", [sent!["hash"]]);
  await chain.resumeMining();
  await facilitator.kill9();
  expect(await facilitator.run("restore", file)).toMatchObject({ code: 0 });
  await facilitator.restart();
  await chain.blacklist(payer.address);
  expect((await facilitator.settle(payment.settleRequest)).status).toBe(503);
  await chain.unblacklist(payer.address);
  await chain.rpc("eth_sendRawTransaction", [sent!["raw"]]);
  expect((await facilitator.settle(payment.settleRequest)).body).toMatchObject({
    success: true,
    transaction: sent!["hash"],
  });
  expect(await chain.transfers({ nonce })).toHaveLength(1);
});

test.concurrent("a copy that is put in its place by hand is recognised, and one that does not hold is not put there", async () => {
  await using services = await startServices();
  const { gateway } = services;
  const agent = await services.open();
  const call = await agent.call();
  await call.ended((await call.send()).body.invocation_id);
  const file = join(dir, "by-hand.db");
  expect(await gateway.run("backup", file)).toMatchObject({ code: 0 });
  expect(await gateway.run("restore", file)).toMatchObject({
    code: 2,
    stderr: expect.stringMatching(/another tollgate runs on the data directory .*: stop it first\n/),
  });
  await gateway.stop();
  const damaged = join(dir, "damaged.db");
  writeFileSync(damaged, readFileSync(file).subarray(0, 40_000));
  expect(await gateway.run("restore", damaged)).toMatchObject({
    code: 2,
    stderr: expect.stringContaining("can't be restored"),
  });
  const elsewhere = join(dir, "elsewhere");
  expect((await gateway.run("restore", file, "--data-dir", elsewhere)).code).toBe(2);
  expect(existsSync(elsewhere)).toBe(false);
  copyFileSync(file, join(gateway.dataDir, "tollgate.db"));
  await gateway.restart();
  expect(gateway.log()).toContain('"database_restored"');
  const late = await agent.call();
  expect((await late.send()).status).toBe(402);
  // Once is enough.
  await gateway.stop();
  await gateway.restart();
  expect(gateway.log().split('"database_restored"')).toHaveLength(2);
});

test.concurrent("a database that does not tell that it was restored loses no waiting call unasked on a terminal", async () => {
  await using services = await startServices({ gatewayEnv: { TOLLGATE_AGENT_CONCURRENCY: "1" } });
  const { gateway, upstream } = services;
  const agent = await services.open();
  const [running, first, second] = [await agent.call(), await agent.call(), await agent.call()];
  upstream.hold(running.nonce);
  await running.send();
  await upstream.visited(running.nonce);
  const [one, other] = [await first.send(), await second.send()];
  await gateway.kill9();
  const asked = Promise.withResolvers<void>();
  let shown = "";
  const restoring = Bun.spawn([tollgateBinary(), "restore", "--data-dir", gateway.dataDir], {
    ...{ cwd: dir, env: { PATH: "/usr/bin:/bin" } },
    terminal: {
      ...{ cols: 200, rows: 24 },
      data(_terminal, bytes) {
        shown += new TextDecoder().decode(bytes);
        if (shown.includes("this ends 2 waiting calls, 2 of them paid.")) asked.resolve();
      },
    },
  });
  await asked.promise;
  restoring.terminal?.write("n\n");
  expect(await restoring.exited).toBe(1);
  await gateway.restart();
  expect(await first.ended(one.body.invocation_id)).toMatchObject({ status: "succeeded" });
  expect(await second.ended(other.body.invocation_id)).toMatchObject({ status: "succeeded" });
  // Nothing waits any more, so nobody is asked.
  await gateway.stop();
  expect(await gateway.run("restore")).toMatchObject({ code: 0 });
});

test.skipIf(process.getuid?.() !== 0)(
  "what root restores, migrates or begins is the service's, who has to open it",
  async () => {
    const NOBODY = 65_534;
    await using gateway = await startGateway();
    const file = join(dir, "of-root.db");
    expect(await gateway.run("backup", file)).toMatchObject({ code: 0 });
    for (const command of [["restore", file], ["migrate"], ["token", "--tenant", "acme", "--user", "me"]]) {
      const dataDir = join(dir, `of the service, to ${command[0]}`);
      mkdirSync(dataDir, { mode: 0o700 });
      chownSync(dataDir, NOBODY, NOBODY);
      if (command.includes(file)) {
        copyFileSync(join(gateway.dataDir, "master.key"), join(dataDir, "master.key"));
        chownSync(join(dataDir, "master.key"), NOBODY, NOBODY);
      }
      const done = await runCommand(command, { cwd: dir, env: { TOLLGATE_DATA_DIR: dataDir } });
      expect(done).toMatchObject({ code: 0 });
      const owners = readdirSync(dataDir).map((name) => [name, statSync(join(dataDir, name)).uid]);
      expect(owners.length).toBeGreaterThan(0);
      expect(owners.filter(([, uid]) => uid !== NOBODY)).toEqual([]);
    }
  },
);
