// Announcements of one replica to the others, over LISTEN and NOTIFY of Postgres: which calls have ended, and that it is leaving.
// They only save time: what is lost is found by polling, a second or two later. NOTIFY takes a server-wide lock at its commit,
// so it is never part of a write, and the IDs of ended calls are batched.
import type { SQL } from "bun";
import type { Log } from "../../core/log.ts";
import { every } from "../../kernel/loop.ts";
import { within } from "../failures.ts";
import type { StoreTools } from "../store.ts";
import { postgresClient } from "./pool.ts";

const CHANNEL = "tollgate";
/** The time limit of an announcement: a connection to a server that is gone may hang for a quarter of an hour. */
const ANSWER_MS_MAX = 4_000;
/**
 * The sender, and one of: the calls that have ended; `left`; `here`, a test message to itself. Anybody who may connect to the
 * database may publish here, so the pattern is unambiguous: with two ways to match each ID, 8,000 bytes took 1.3 s (measured).
 */
const PAYLOAD = /^(rep_[\w-]+) (left|here|inv_[\w-]+(?:,inv_[\w-]+)*)$/;

export interface Subscriber {
  /** A call has ended on another replica. */
  ended(id: string): void;
  /** Another replica is leaving, and its pending calls are free to be taken. */
  left(): void;
}

interface AnnouncementsOptions extends Subscriber {
  /** A direct URL of the database: through a transaction pooler nothing is heard. */
  readonly url: string;
  readonly replica: string;
  readonly log: Log;
  /** Shortened by tests, as is the next one. */
  readonly checkEveryMs?: number;
  readonly answerMsMax?: number;
}

interface Publisher extends Pick<StoreTools, "store" | "log"> {
  readonly options: { readonly listenUrl: string | null };
}

/** Publishes every call that ends in this process from now on; null when no listen URL is configured. */
export function announceEnds({ options, store, log }: Publisher, replica: string, subscriber: Subscriber) {
  if (options.listenUrl === null) return null;
  const announcements = createAnnouncements({ url: options.listenUrl, replica, log, ...subscriber });
  store.onCallEnded(({ invocation_id }) => announcements.ended(invocation_id));
  return announcements;
}

/** Publishes on a primary only, so that a replica connected to an old, read-only primary finds out that it hears nobody. */
const PUBLISH = "select pg_notify($1, $2) where current_setting('transaction_read_only') = 'off'";

export function createAnnouncements(options: AnnouncementsOptions) {
  const { url, replica, log, checkEveryMs = 5_000, answerMsMax = ANSWER_MS_MAX, ...heard } = options;
  let client: SQL = postgresClient(url);
  let ids: string[] = [];
  let isWaiting = false;
  let isClosed = false;
  let isKnownDeaf = false;
  let isListening = false;
  let hasHeardItself = () => {};

  function receive(payload: string): void {
    const [, sender, what] = PAYLOAD.exec(payload) ?? [];
    // Of its own messages a replica heeds only `here`; of others', all but that.
    if (what === undefined || (sender === replica) !== (what === "here")) return;
    if (what === "here") hasHeardItself();
    else if (what === "left") heard.left();
    else for (const id of what.split(",")) heard.ended(id);
  }

  const publish = async (what: string) =>
    void (await within(ANSWER_MS_MAX, client.unsafe(PUBLISH, [CHANNEL, `${replica} ${what}`])));

  const drop = (old: SQL) => old.close({ timeout: 0 }).catch(() => {});

  /** Listens unless it does already, and fails unless it then hears its own message. */
  async function check(): Promise<void> {
    // Bun reconnects by itself when the connection is lost.
    if (!isListening) await within(answerMsMax, client.listen(CHANNEL, receive));
    const { promise, resolve } = Promise.withResolvers<void>();
    hasHeardItself = resolve;
    await publish("here");
    await within(answerMsMax, promise);
  }

  async function keepListening(): Promise<void> {
    try {
      await check();
      isListening = true;
      isKnownDeaf = false;
    } catch (error) {
      if (isClosed) return;
      if (!isKnownDeaf) log.warn("announcements_not_heard", { error });
      isKnownDeaf = true;
      isListening = false;
      // The URL may lead to another server by now.
      const old = client;
      client = postgresClient(url);
      void drop(old);
    }
  }

  async function flush(): Promise<void> {
    isWaiting = true;
    const ended = ids;
    ids = [];
    // The first announcement after a silence is sent at once; those of the next 50 ms are batched.
    await Promise.all([publish(ended.join()).catch(() => {}), Bun.sleep(50)]);
    isWaiting = false;
    if (ids.length > 0 && !isClosed) void flush();
  }

  void keepListening();
  const stopListening = every(checkEveryMs, keepListening);
  return {
    ended(id: string): void {
      // Postgres bounds a payload to 8,000 bytes. Other replicas find further ends by polling.
      if (ids.length >= 180) return;
      ids.push(id);
      if (!isWaiting) void flush();
    },
    /** Announces that this replica is leaving, so that others take its pending calls. */
    left: (): Promise<void> => publish("left").catch(() => {}),
    async close(): Promise<void> {
      isClosed = true;
      stopListening();
      await drop(client);
    },
  };
}
