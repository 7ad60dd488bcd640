// Calls without a payment, on either database: accepted durably, and accepted, made and recorded; each beside a bare
// server that does the same and nothing else, measured right before it.
import { residentMb, residentOver } from "./cores.ts";
import { type BenchDatabase, DATABASES, type OpenDatabase } from "./databases.ts";
import { accepts, CONNECTIONS, warmUp, wholeCalls } from "./measure.ts";
import type { Report } from "./report.ts";
import type { Row } from "./table.ts";
import {
  type BenchUpstream,
  type GatewayTarget,
  HELD_BACK,
  openFloor,
  openGateway,
  quickUpstream,
  silentUpstream,
} from "./targets.ts";

const ONE = { connections: 1 };
/** At this many queued calls the resident set is looked at, for so long that the garbage of their accepts has been collected. */
const QUEUED = 100_000;
const QUEUED_MS = 15_000;
const QUEUE_SECONDS_MAX = 45;

/** @param seconds of each load */
export async function acceptedCalls(seconds: number, report: Report): Promise<void> {
  for (const open of DATABASES) {
    const floors = await bareAccepts(seconds, report, open);
    await heldBack(seconds, report, open, floors);
  }
}

interface Floors {
  readonly many: Row;
  readonly one: Row;
}

async function bareAccepts(seconds: number, report: Report, open: OpenDatabase): Promise<Floors> {
  const database = await open();
  await using target = await openFloor(database);
  await warmUp(target);
  const many = await accepts(target, { seconds });
  const one = await accepts(target, { seconds: seconds / 2, ...ONE });
  const name = (connections: number) => `bare group commit, ${connections} connections, ${database.name}`;
  return {
    many: report.add(name(CONNECTIONS), many.figures, many),
    one: report.add(name(1), one.figures, one),
  };
}

/** The only upstream call that may run never ends, so all others stay queued. */
async function heldBack(seconds: number, report: Report, open: OpenDatabase, floors: Floors): Promise<void> {
  const database = await open();
  await using upstream = silentUpstream();
  await using target = await openGateway(database, { upstream, env: HELD_BACK });
  const idle = residentMb(target.pid);
  await warmUp(target);
  const name = (connections: number) => `durable accepts, ${connections} connections, ${database.name}`;
  const many = await accepts(target, { seconds });
  report.add(name(CONNECTIONS), many.figures, { floor: [floors.many, "rate"], note: many.note });
  const one = await accepts(target, { seconds: seconds / 2, ...ONE });
  report.add(name(1), one.figures, { floor: [floors.one, "p50_ms"], note: one.note });
  // What a queued call holds of memory is the same on both, and this takes long where accepts are slow.
  if (database.url === null) await queued(target, idle, report);
}

async function queued(target: GatewayTarget, idle: number, report: Report): Promise<void> {
  const missing = QUEUED - (await target.total("pending"));
  if (missing > 0) await accepts(target, { seconds: QUEUE_SECONDS_MAX, answersMax: missing });
  const pending = await target.total("pending");
  const resident = residentOver(target.pid);
  await Bun.sleep(QUEUED_MS);
  const note = `${pending} queued; ${Math.round(idle)} MB after the start`;
  report.add(`resident with ${QUEUED} calls queued, ${target.database.name}`, { rss_mb: resident().least }, { note });
}

/** @param seconds of each load; what is left of it then is done before the clock is read */
export async function recordedCalls(seconds: number, report: Report): Promise<void> {
  for (const open of DATABASES) {
    await using upstream = quickUpstream();
    const floor = await bareCalls(seconds, report, await open(), upstream);
    const database = await open();
    await using target = await openGateway(database, { upstream });
    const before = await target.total("succeeded");
    // A page of open calls walks past all of them: asked every 50 ms, that was a tenth of what the server did (measured).
    const left = async (accepted: number) =>
      Math.max(before + accepted - (await target.total("succeeded")), 0) ||
      (await target.total("pending")) + (await target.total("running"));
    const { figures, note, accepted } = await wholeCalls(target, seconds, left);
    report.add(`accepted, called, recorded, ${database.name}`, figures, { floor: [floor, "rate"], note });
    const succeeded = (await target.total("succeeded")) - before;
    if (succeeded < accepted) throw new Error(`of ${accepted} calls only ${succeeded} have succeeded`);
  }
}

async function bareCalls(seconds: number, report: Report, database: BenchDatabase, upstream: BenchUpstream) {
  await using target = await openFloor(database, upstream);
  const { figures, note } = await wholeCalls(target, seconds, target.left);
  return report.add(`bare prototype of the same, ${database.name}`, figures, { note });
}
