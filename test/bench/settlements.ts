// Collecting payments on a chain with blocks of two seconds, by one key: the compiled facilitator over mutual TLS, one by
// one and fifty to a transaction, beside the official library's settle with one wallet. What counts is what the chain
// says has moved, and the gas that its receipts name.
import { join } from "node:path";
import type { Address, Hex } from "viem";
import { generatePrivateKey, privateKeyToAccount } from "viem/accounts";
import { startChain, type TestChain } from "../support/chain/chain.ts";
import { type Connection, type Facilitator, startFacilitator } from "../support/chain/facilitator.ts";
import { newPayer, type SignedPayment, signPayment } from "../support/chain/payments.ts";
import { coreSecondsIn } from "./cores.ts";
import { officialPayment, officialSettle } from "./official.ts";
import { figure, perSecond, type Rate, say, times } from "./report.ts";

export const BLOCK_SECONDS = 2;
export const PRICE = 1_000n;
const PAYMENTS = 1_200;
const CONNECTIONS = 600;
/** Below what the listener takes of handshakes at a time. */
const HANDSHAKES = 64;
const BATCH = 50;
const AGAIN_MAX = 5;
const AGAIN_MS = 1_000;

const OFFICIAL_AT_ONCE = 52;
const OFFICIAL_IN_TURN = 4;
/** Of a settlement by the library, which itself would wait for three minutes. */
const OFFICIAL_MS_MAX = 20_000;

interface Collected extends Rate {
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
async function collect(
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
  const gas = (await gasOf(chain, new Set(transfers.map((each) => each.transaction_hash)))) / transfers.length;
  return { count: transfers.length, seconds, blocks: [...perBlock.keys()], most, gas };
}

async function gasOf(chain: TestChain, hashes: ReadonlySet<Hex>): Promise<number> {
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
async function settled(connection: Connection, { settleRequest }: SignedPayment): Promise<Told> {
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

/** @param batch most payments in one transaction; 0: one by one */
async function ours(chain: TestChain, batch: number): Promise<number> {
  await using facilitator = await startFacilitator(chain, { env: { TOLLGATE_BATCH: `${batch}` } });
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
  const used = homes.map((home, index) => (coreSecondsIn(home) - (before[index] ?? 0)) / PAYMENTS);
  const [own, node] = used.map((seconds) => (seconds * 1000).toFixed(1));
  for (const connection of open) connection.close();
  await facilitator.stop();
  const waits = told.map(({ seconds }) => seconds).sort((a, b) => a - b);
  const at = (share: number) => (waits[Math.floor(waits.length * share)] ?? 0).toFixed(1);
  const again = told.reduce((sum, each) => sum + each.again, 0);
  const successes = told.filter(({ success }) => success).length;
  const span = Math.max(...collected.blocks) - Math.min(...collected.blocks) + 1;
  figure(
    `ours over mutual TLS, ${batch === 0 ? "one by one" : `up to ${batch} in a transaction`}`,
    perSecond(collected),
    `${collected.count} of ${PAYMENTS} in ${span} blocks, at most ${collected.most} in one; ${Math.round(collected.gas)} gas each`,
  );
  say(
    `  ${CONNECTIONS} at a time; ${successes} told so in p50 ${at(0.5)} s, p99 ${at(0.99)} s, ${again} asked again; core time for each ${own} ms, and ${node} ms of anvil`,
  );
  return perSecond(collected);
}

/** @param atOnce how many at a time */
async function official(chain: TestChain, count: number, atOnce: number): Promise<Collected> {
  const key = generatePrivateKey();
  await chain.fundEth(privateKeyToAccount(key).address, 10n ** 19n);
  const settle = officialSettle(chain.url, key);
  const all = await payments(chain, count);
  return collect(chain, all, () =>
    strands(all.map(officialPayment), Array.from({ length: atOnce }), async (payment) => {
      const { promise: late, resolve } = Promise.withResolvers<void>();
      const timer = setTimeout(resolve, OFFICIAL_MS_MAX);
      // It throws where it fails.
      await Promise.race([settle(payment).catch(() => false), late]);
      clearTimeout(timer);
    }),
  );
}

export async function settlements(): Promise<void> {
  say(`settlements: the real token on anvil, blocks of ${BLOCK_SECONDS} s, one key that pays the gas`);
  const chain = await startChain({ blockTimeSeconds: BLOCK_SECONDS });
  try {
    const own = await ours(chain, 0);
    await ours(chain, BATCH);
    for (const [name, count, atOnce] of [
      [`x402 settle, ${OFFICIAL_AT_ONCE} at once`, OFFICIAL_AT_ONCE, OFFICIAL_AT_ONCE],
      ["x402 settle, one after the other", OFFICIAL_IN_TURN, 1],
    ] as const) {
      const collected = await official(chain, count, atOnce);
      const rate = perSecond(collected);
      const { length: blocks } = collected.blocks;
      figure(
        name,
        rate,
        `${collected.count} of ${count} collected in ${blocks} blocks; ours is ${times(own, rate)} times that`,
      );
    }
  } finally {
    await chain.stop();
  }
}
