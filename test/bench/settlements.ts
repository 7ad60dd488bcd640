// Collecting payments on a chain with blocks of two seconds, by one key: the compiled facilitator over mutual TLS, one by
// one and fifty to a transaction. What counts is what the chain says has moved, and the gas that its receipts name.
import { join } from "node:path";
import type { Address, Hex } from "viem";
import { startChain, type TestChain } from "../support/chain/chain.ts";
import { type Connection, type Facilitator, startFacilitator } from "../support/chain/facilitator.ts";
import { newPayer, type SignedPayment, signPayment } from "../support/chain/payments.ts";
import { coreSecondsIn } from "./cores.ts";
import { perSecond, type Rate, type Report, say } from "./report.ts";
import { latency, type Row } from "./table.ts";

export const BLOCK_SECONDS = 2;
export const PRICE = 1_000n;
const PAYMENTS = 1_200;
const CONNECTIONS = 600;
/** Below what the listener takes of handshakes at a time. */
const HANDSHAKES = 64;
export const BATCH = 50;
/** Gas costs a hundred times as much on anvil as on Base, so the bound of what open payments may burn would hold them up. */
export const ANY_GAS = { TOLLGATE_DAILY_GAS_WEI: "0" };
const AGAIN_MAX = 5;
const AGAIN_MS = 1_000;

export interface Collected extends Rate {
  readonly blocks: readonly number[];
  readonly most: number;
  /** For each payment. */
  readonly gas: number;
}

/** The directory that a service of test/support works in. */
export function homeOf({ dataDir }: { readonly dataDir: string }): string {
  return join(dataDir, "..", "elsewhere");
}

/** A payer with the money for so many payments, and the payments. */
export async function payments(chain: TestChain, count: number): Promise<SignedPayment[]> {
  const payer = newPayer();
  const to = newPayer().address;
  await chain.fundUsdc(payer.address, PRICE * BigInt(count));
  return Promise.all(Array.from({ length: count }, () => signPayment(payer, { to, value: PRICE })));
}

/** Has them settled, and looks at the chain for what came of it. */
export async function collect(
  chain: TestChain,
  all: readonly SignedPayment[],
  settleAll: () => Promise<unknown>,
): Promise<Collected> {
  const from = all[0]?.authorization.from as Address;
  const startedAt = performance.now();
  await settleAll();
  const seconds = (performance.now() - startedAt) / 1000;
  const transfers = await chain.transfers({ from });
  const perBlock = Map.groupBy(transfers, ({ block_number }) => block_number);
  const most = Math.max(0, ...[...perBlock.values()].map(({ length }) => length));
  const hashes = new Set(transfers.map((each) => each.transaction_hash));
  const gas = transfers.length === 0 ? 0 : (await gasOf(chain, hashes)) / transfers.length;
  return { count: transfers.length, seconds, blocks: [...perBlock.keys()], most, gas };
}

/** Of these transactions together. */
export async function gasOf(chain: TestChain, hashes: Iterable<Hex>): Promise<number> {
  let sum = 0;
  for (const hash of hashes) sum += Number((await chain.client.getTransactionReceipt({ hash })).gasUsed);
  return sum;
}

/** So many strands, each with the next one as soon as it is done with the last. */
export async function strands<T, S>(
  items: Iterable<T>,
  those: readonly S[],
  work: (item: T, strand: S) => Promise<void>,
): Promise<void> {
  const rest = items[Symbol.iterator]();
  await Promise.all(
    those.map(async (strand) => {
      for (let next = rest.next(); !next.done; next = rest.next()) await work(next.value, strand);
    }),
  );
}

async function connections(facilitator: Facilitator): Promise<Connection[]> {
  const open: Connection[] = [];
  const hands = Array.from({ length: HANDSHAKES }, () => null);
  await strands(Array.from({ length: CONNECTIONS }).keys(), hands, async () => {
    open.push(await facilitator.connect());
  });
  return open;
}

interface Told {
  readonly success: boolean;
  /** How often the same payment was presented again, because its outcome was not known yet. */
  readonly again: number;
  readonly seconds: number;
}

/** As a caller does it: what is not known yet is asked again, with the same payment. */
export async function settled(connection: Connection, { settleRequest }: SignedPayment): Promise<Told> {
  const startedAt = performance.now();
  for (let again = 0; ; again++) {
    const { status, body } = await connection.settle(settleRequest);
    const success = status === 200 && body.success === true;
    const isKnown = success || (status === 200 && body.transaction === "");
    const seconds = (performance.now() - startedAt) / 1000;
    if (isKnown || again === AGAIN_MAX) return { success, again, seconds };
    await Bun.sleep(AGAIN_MS);
  }
}

interface CollectOptions {
  /** Most payments in one transaction; 0: one by one. */
  readonly batch: number;
  readonly floor?: Row;
}

/** The facilitator's row. */
export async function collectPayments(
  chain: TestChain,
  report: Report,
  { batch, floor }: CollectOptions,
): Promise<Row> {
  await using facilitator = await startFacilitator(chain, { env: { ...ANY_GAS, TOLLGATE_BATCH: `${batch}` } });
  const all = await payments(chain, PAYMENTS);
  const open = await connections(facilitator);
  const told: Told[] = [];
  const homes = [homeOf(facilitator), chain.home] as const;
  const before = homes.map(coreSecondsIn);
  const collected = await collect(chain, all, () =>
    strands(all, open, async (payment, connection) => {
      told.push(await settled(connection, payment));
    }),
  );
  const [own_us = 0, node_us = 0] = homes.map(
    (home, index) => ((coreSecondsIn(home) - (before[index] ?? 0)) * 1e6) / PAYMENTS,
  );
  for (const connection of open) connection.close();
  await facilitator.stop();
  const again = told.reduce((sum, each) => sum + each.again, 0);
  const successes = told.filter(({ success }) => success).length;
  const span = Math.max(...collected.blocks) - Math.min(...collected.blocks) + 1;
  const waits = latency(told.map(({ seconds }) => seconds * 1000));
  return report.add(
    `one key, over mutual TLS, ${batch === 0 ? "one by one" : `up to ${batch} in a transaction`}`,
    { rate: perSecond(collected), ...waits, cpu_us: own_us, gas: collected.gas },
    {
      note: `${collected.count} of ${PAYMENTS} collected in ${span} blocks, at most ${collected.most} in one; ${CONNECTIONS} at a time, ${successes} told so, ${again} asked again; anvil used ${Math.round(node_us)} µs for each`,
      ...(floor !== undefined && { floor: [floor, "rate"] as const }),
    },
  );
}

export async function settlements(_seconds: number, report: Report): Promise<void> {
  say(`settlements: the real token on anvil, blocks of ${BLOCK_SECONDS} s, one key that pays the gas`);
  const chain = await startChain({ blockTimeSeconds: BLOCK_SECONDS });
  try {
    const floor = await collectPayments(chain, report, { batch: 0 });
    await collectPayments(chain, report, { batch: BATCH, floor });
  } finally {
    await chain.stop();
  }
}
