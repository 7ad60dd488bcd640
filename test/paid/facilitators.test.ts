// Several facilitators on one Postgres, with the same keys: the wallets are shared out among them, each works for its own,
// and what one can't go on with another one does. Whatever happens to them, each authorization moves its money once.

import { afterAll, beforeAll, expect, setDefaultTimeout, test } from "bun:test";
import { SQL } from "bun";
import type { Address, Hex } from "viem";
import { startChain, type TestChain } from "../support/chain/chain.ts";
import { type Facilitator, type FacilitatorOptions, startFacilitator } from "../support/chain/facilitator.ts";
import { newPayer, type SignedPayment, signPayment } from "../support/chain/payments.ts";
import { type RpcRelay, startRpcRelay } from "../support/chain/rpc-relay.ts";
import { steppedClock } from "../support/gateway/stepped-clock.ts";
import { startPostgres } from "../support/stores/postgres.ts";
import { until } from "../support/until.ts";

/** More than every wait inside takes before it fails and says for what it waited. */
setDefaultTimeout(120_000);
const PRICE = 1000n;
const AGAIN_MS = 100;
const SEND = "eth_sendRawTransaction";

interface Running {
  readonly facilitator: Facilitator;
  /** Before its node. */
  readonly relay: RpcRelay;
}

let chain: TestChain;
const stack = new AsyncDisposableStack();
let one: Running;
let other: Running;
let sql: SQL;

async function start(options: FacilitatorOptions = {}): Promise<Running> {
  const relay = await startRpcRelay(chain.url);
  stack.defer(() => relay.stop());
  const facilitator = stack.use(await startFacilitator(chain, { ...options, rpcUrls: [relay.url] }));
  return { facilitator, relay };
}

beforeAll(async () => {
  chain = await startChain({ blockTimeSeconds: 1 });
  stack.defer(() => chain.stop());
  const database = await (await startPostgres()).freshDatabase();
  sql = stack.use(new SQL(database, { max: 1, database: new URL(database).pathname.slice(1) }));
  // Long enough for a wallet to change hands meanwhile, as it does when a busy machine lets a lease run out.
  one = await start({ env: { DATABASE_URL: database, TOLLGATE_INCLUSION_TIMEOUT_MS: "60000" } });
  // Its clock is off by 20 s all the time.
  other = await start({ beside: one.facilitator, ...steppedClock(20_000) });
});
afterAll(() => stack.disposeAsync());

async function newPayments(count: number): Promise<SignedPayment[]> {
  const payer = newPayer();
  await chain.fundUsdc(payer.address, PRICE * BigInt(count));
  const sign = () => signPayment(payer, { to: newPayer().address, value: PRICE });
  return Promise.all(Array.from({ length: count }, sign));
}

/** Has them settled by all of these in turns. */
const settleAll = (payments: readonly SignedPayment[], those: readonly Running[]) =>
  payments.map(({ settleRequest }, index) =>
    those[index % those.length]!.facilitator.settle(settleRequest).catch(() => null),
  );

/** As a gateway does it: what is not known yet is asked again, with the same payment. */
async function settled({ settleRequest }: SignedPayment, by: Running): Promise<void> {
  await until(async () => {
    const { status, body } = await by.facilitator.settle(settleRequest);
    expect(status === 200 && body.transaction === "").toBe(false);
    if (status === 200 && body.success === true) return true;
    await Bun.sleep(AGAIN_MS);
    return false;
  });
}

async function expectMovedOnce(payments: readonly SignedPayment[]): Promise<void> {
  for (const { authorization } of payments) {
    expect(await chain.transfers({ nonce: authorization.nonce })).toHaveLength(1);
  }
}

/** Every nonce that was given is used, and nothing waits behind a gap. */
async function expectNoGap(wallet: Address): Promise<void> {
  const count = (tag: string) => chain.rpc("eth_getTransactionCount", [wallet, tag]) as Promise<Hex>;
  await until(async () => (await count("latest")) === (await count("pending")));
  const { queued } = (await chain.rpc("txpool_status")) as { queued: Hex };
  expect(Number(queued)).toBe(0);
}

/** So many transactions wait for a block. */
const untilPending = (count: number) =>
  until(async () => Number(((await chain.rpc("txpool_status")) as { pending: Hex }).pending) >= count);

const wallet = () => one.facilitator.signers[0]!;
/** Which of the two works for the wallet, by the database. */
async function isHolder({ facilitator }: Running): Promise<boolean> {
  const [row] = await sql`select holder from facilitator_wallets`;
  return facilitator.lines("wallet_taken").some((line) => line["facilitator"] === row.holder);
}

/** The holder, and the one that stands by. */
async function parts(): Promise<[holder: Running, standby: Running]> {
  await until(async () => (await isHolder(one)) || (await isHolder(other)));
  return (await isHolder(one)) ? [one, other] : [other, one];
}

test("with one key, one facilitator sends what both are asked for, and both answer", async () => {
  const payments = await newPayments(20);
  const answers = await Promise.all(settleAll(payments, [one, other]));
  expect(answers.map((answer) => [answer?.status, answer?.body.success])).toEqual(payments.map(() => [200, true]));
  await expectMovedOnce(payments);
  const [holder, standby] = await parts();
  expect(holder.relay.count(SEND)).toBeGreaterThan(0);
  // On a machine so busy that a lease ran out, the wallet has changed hands.
  if (standby.facilitator.lines("wallet_taken").length === 0) expect(standby.relay.count(SEND)).toBe(0);
  await expectNoGap(wallet());
});

test("the ceiling of an account holds over both, and one that is disabled settles at neither", async () => {
  const client = await one.facilitator.addAccount("small", { dailyCeiling: 10n * PRICE });
  const payments = await newPayments(16);
  const ask = (index: number, { settleRequest }: SignedPayment) =>
    [one, other][index % 2]!.facilitator.settle(settleRequest, client);
  const answers = await Promise.all(payments.map((payment, index) => ask(index, payment)));
  const statuses = answers.map(({ status }) => status).sort();
  expect(statuses).toEqual([...Array(10).fill(200), ...Array(6).fill(429)]);
  await one.facilitator.run("account", "disable", "small");
  const refused = await Promise.all(payments.slice(0, 2).map((payment, index) => ask(index, payment)));
  expect(refused.map(({ status }) => status)).toEqual([403, 403]);
});

test("a facilitator whose nodes are away hands over, and what was claimed is settled by the other", async () => {
  const [holder, standby] = await parts();
  await holder.relay.refuse();
  await until(() => isHolder(standby));
  const payments = await newPayments(6);
  await Promise.all(payments.map((payment) => settled(payment, standby)));
  await holder.relay.restore();
  await expectMovedOnce(payments);
  await expectNoGap(wallet());
});

test("of a facilitator that is held up for longer than its lease, another goes on with what it had", async () => {
  const payments = await newPayments(12);
  await chain.pauseMining();
  const answers = settleAll(payments, [one, other]);
  await untilPending(6);
  const [holder, standby] = await parts();
  process.kill(holder.facilitator.pid, "SIGSTOP");
  try {
    await until(() => isHolder(standby));
    await chain.resumeMining();
    await Promise.all(payments.map((payment) => settled(payment, standby)));
  } finally {
    process.kill(holder.facilitator.pid, "SIGCONT");
  }
  await Promise.all(answers);
  await Promise.all(payments.map((payment) => settled(payment, holder)));
  await expectMovedOnce(payments);
  await expectNoGap(wallet());
});

test("what a killed facilitator had claimed, signed and broadcast is taken up within seconds", async () => {
  const payments = await newPayments(12);
  await chain.pauseMining();
  const answers = settleAll(payments, [one, other]);
  await untilPending(6);
  const [holder, standby] = await parts();
  await holder.facilitator.kill9();
  await until(() => isHolder(standby));
  await chain.resumeMining();
  await Promise.all(payments.map((payment) => settled(payment, standby)));
  await Promise.all(answers);
  await expectMovedOnce(payments);
  await expectNoGap(wallet());
  await holder.facilitator.restart();
  await Promise.all(payments.slice(0, 2).map((payment) => settled(payment, holder)));
});
