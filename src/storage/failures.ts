// Translates errors of the two database clients into the product's own, without the values of queries, which may be secret.
import { SQLiteError } from "bun:sqlite";
import { SQL } from "bun";
import { DrizzleQueryError } from "drizzle-orm";
import { errorCode, Fault } from "../core/fault.ts";
import { PassingStartupProblem, StartupProblem } from "../core/startup.ts";
import { MAX } from "../kernel/limits.ts";
import { actingRequest, countWait, withDeadline } from "../kernel/wait.ts";
import { CommitUnknown, STORE_RETRY_AFTER_SECONDS, STORE_UNAVAILABLE, UniqueViolation } from "./store.ts";

export const unavailable = (cause: unknown): Fault =>
  new Fault("unavailable", STORE_UNAVAILABLE, { retryAfterSeconds: STORE_RETRY_AFTER_SECONDS, cause });

export const isUnavailable = (error: unknown): boolean => error instanceof Fault && error.kind === "unavailable";

export const waitedTooLong = () => unavailable(new Error("the request has waited for the database too long"));

/** The database client's error inside Drizzle's, whose message shows all values. */
export const clientError = (error: unknown): unknown => (error instanceof DrizzleQueryError ? error.cause : error);

const SQLITE_UNIQUE = /^SQLITE_CONSTRAINT_(UNIQUE|PRIMARYKEY|ROWID)$/;
/** Conditions of the disk or of other processes, which pass or which an operator can remove. */
const SQLITE_PASSING = /^SQLITE_(FULL|IOERR|READONLY|BUSY|LOCKED|CANTOPEN|NOMEM|PROTOCOL|PERM)(_|$)/;

export const isSqliteBusy = (error: unknown): boolean =>
  error instanceof SQLiteError && error.code?.startsWith("SQLITE_BUSY") === true;

export function sqliteFailure(error: unknown): unknown {
  if (!(error instanceof SQLiteError) || error.code === undefined) return error;
  if (SQLITE_UNIQUE.test(error.code)) return new UniqueViolation("a value must be unique", { cause: error });
  return SQLITE_PASSING.test(error.code) ? unavailable(error) : error;
}

/** The meaning of a failed commit. After an I/O error it is unknown: the disk may have stored what it reported as failed. */
export function sqliteCommitFailure(error: unknown): Fault {
  const isUnknown = error instanceof SQLiteError && error.code?.startsWith("SQLITE_IOERR");
  return isUnknown ? new CommitUnknown(error) : unavailable(error);
}

export const sqlState = (error: unknown): string | undefined =>
  error instanceof SQL.PostgresError ? error.errno : undefined;

const LOST = /^ERR_POSTGRES_(CONNECTION_|IDLE_TIMEOUT|LIFETIME_TIMEOUT)/;
/** Connection exceptions, and a server that shuts down or starts. */
const LOST_STATE = /^(08|57P0)/;

/** Whether the connection is lost, or could not be made. The client's own errors carry no SQLSTATE. */
export function isConnectionLost(error: unknown): boolean {
  if (!(error instanceof SQL.PostgresError)) return false;
  const state = sqlState(error);
  return state === undefined ? LOST.test(error.code) : LOST_STATE.test(state);
}

/** Whether the server is a standby, or an old primary that was made read-only: another server takes the writes now. */
export const isServerReadOnly = (error: unknown): boolean => sqlState(error) === "25006";

/** Wrong name or password, no such database, not allowed. */
const START_REFUSED_STATE = /^(28|3D|42501$)/;
const TOO_MANY_CONNECTIONS = "53300";
/** The state of all errors that a pooler reports itself, such as an unreachable server. */
export const POOLER_STATE = "08P01";

/**
 * Why Postgres can't be used at the start, if its operator can put it right; otherwise undefined. These messages of the server
 * name the user and the database, never a password.
 * @param databaseUrl names the server that was asked, where it is known
 */
export function startProblem(error: unknown, databaseUrl?: string): StartupProblem | undefined {
  const server = "the Postgres server of DATABASE_URL";
  const state = sqlState(error);
  const isFromPooler = state === POOLER_STATE;
  if (isUnavailable(error) || (isConnectionLost(error) && !isFromPooler)) {
    // A proxy before a Postgres that is still starting closes connections too, so this may pass.
    const isClosed = error instanceof SQL.PostgresError && error.code === "ERR_POSTGRES_CONNECTION_FAILED";
    const why = isClosed ? ": the connection was closed, as by a server that is not Postgres" : "";
    return new PassingStartupProblem(`${server} does not answer${placeOf(databaseUrl)}${why}`, { cause: error });
  }
  if (!(error instanceof SQL.PostgresError)) return undefined;
  const refusal = `${server} refuses: ${error.message}`;
  if (isFromPooler || state === TOO_MANY_CONNECTIONS) return new PassingStartupProblem(refusal, { cause: error });
  const refused = state === undefined ? error.code.includes("_TLS_") : START_REFUSED_STATE.test(state);
  return refused ? new StartupProblem(refusal, { cause: error }) : undefined;
}

/** What a failure to open the database is told as. Whether a name is unknown is asked again: the client does not tell it. */
export async function openProblem(error: unknown, databaseUrl: string): Promise<unknown> {
  const problem = startProblem(error, databaseUrl);
  const name = URL.parse(databaseUrl)?.hostname ?? "";
  if (!isConnectionLost(error) || problem === undefined || name.startsWith("[")) return problem ?? error;
  const why = await within(MAX.storeMs, Bun.dns.lookup(name)).then(() => null, errorCode);
  if (why !== "DNS_ENOTFOUND") return problem;
  return new PassingStartupProblem(`${problem.message}: the host name is not found`, { cause: error });
}

/** The host and the port of a server, and nothing else of its URL. */
function placeOf(databaseUrl: string | undefined): string {
  const url = databaseUrl === undefined ? null : URL.parse(databaseUrl);
  return url === null ? "" : ` at ${url.hostname}:${url.port || "5432"}`;
}

/** Out of disk, memory or connections; cancelled by a time limit; lock not available; read-only standby; broken files. */
const POSTGRES_PASSING = /^(53|58|57014$|55P03$|25006$|25P0[234]$|40)/;
const CHARACTER_REFUSED = /^22(021|P05)$/;

/** The meaning of a failure after the commit was sent. An error of the server itself says that it was undone. */
export const postgresCommitFailure = (thrown: unknown): unknown =>
  isConnectionLost(thrown) || isUnavailable(thrown) ? new CommitUnknown(thrown) : postgresFailure(thrown);

export function postgresFailure(thrown: unknown): unknown {
  if (isConnectionLost(thrown)) return unavailable(thrown);
  const state = sqlState(thrown);
  if (state === undefined || !(thrown instanceof Error)) return thrown;
  // The detail of a server's error shows the row's values, so only the message is kept, which names columns. A message of class
  // 22 (data exception) quotes the refused value, so it is replaced.
  const problem = state.startsWith("22") ? "a value was refused" : thrown.message;
  const cause = new Error(`${problem} (SQLSTATE ${state})`);
  if (state === "23505") return new UniqueViolation("a value must be unique", { cause });
  if (POSTGRES_PASSING.test(state)) return unavailable(cause);
  if (!CHARACTER_REFUSED.test(state)) return cause;
  return new Fault("invalid_request", "a text holds a character that cannot be stored", { cause });
}

/** The outcome of `promise`, unless `ms` pass first: then calls `onLate`, throws Fault `unavailable`, and ignores the promise. */
export function within<T>(ms: number, promise: Promise<T>, onLate: () => void = () => {}): Promise<T> {
  return withDeadline(ms, promise, () => {
    onLate();
    return unavailable(new Error(`no answer within ${Math.round(Math.max(ms, 0))} ms`));
  });
}

/**
 * Asks the store, for `msMax` at most, and for no longer than its request may still wait for the store.
 * @param ask is given the deadline, by performance.now(), and must keep it
 * @throws Fault `unavailable`, without asking, when the request has waited for so long already
 */
export function askStore<T>(msMax: number, ask: (until: number) => Promise<T>): Promise<T> {
  return countWait(async (latest) => {
    const now = performance.now();
    if (latest <= now) throw waitedTooLong();
    return ask(Math.min(now + msMax, latest));
  });
}

/** Waits for what many ask together, which takes its time whatever one request among them may still wait. */
export const askTogether = <T>(answer: Promise<T>): Promise<T> =>
  askStore(MAX.storeMs, (until) => within(until - performance.now(), answer));

const PAUSE_MS_FIRST = 100;
const PAUSE_MS_MAX = 5_000;

/** Retries a step with exponential backoff while the store is unavailable, its request, if any, may wait, and `stop` is false. */
export function untilStored<T>(step: () => Promise<T>, stop: () => boolean, pauseMsMax = PAUSE_MS_MAX): Promise<T> {
  // The pauses are part of the wait: a store that refuses at once is away for as long as one that does not answer.
  return countWait(async (until) => {
    for (let pause = PAUSE_MS_FIRST; ; pause = Math.min(pause * 2, pauseMsMax)) {
      try {
        return await step();
      } catch (error) {
        if (!isUnavailable(error) || stop() || actingRequest()?.isOverdue() === true) throw error;
      }
      await Bun.sleep(Math.min(pause, Math.max(0, until - performance.now())));
    }
  });
}
