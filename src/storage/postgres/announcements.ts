// What one replica publishes to the others at once, over LISTEN and NOTIFY of Postgres: which calls have ended, and that it has
// left. It is a help and no more: whatever is lost on the way is found by looking, a second or two later. NOTIFY takes a
// lock of the whole server at its commit, so it is never a part of a write, and the IDs of ended calls are batched.
import type { SQL } from "bun";
import type { Log } from "../../core/log.ts";
import { every } from "../../kernel/loop.ts";
import { within } from "../failures.ts";
import type { Store } from "../store.ts";
import { postgresClient } from "./pool.ts";

const CHANNEL = "tollgate";
/** What is not done by then is not done any more: a connection to a server that is gone may hang for a quarter of an hour. */
const ANSWER_MS_MAX = 4_000;
/**
 * The sender, and the calls that have ended, or that it has left, or that it is there, which is for itself. Anybody who may
 * connect to the database may publish anything here, so there is one way to read each text: with two for each ID a payload of
 * 8,000 bytes took 1.3 s (measured).
 */
const PAYLOAD = /^(rep_[\w-]+) (left|here|inv_[\w-]+(?:,inv_[\w-]+)*)$/;

export interface Subscriber {
  /** A call has ended on another replica. */
  ended(id: string): void;
  /** Another replica has left its pending calls to the others. */
  left(): void;
}

interface AnnouncementsOptions extends Subscriber {
  /** Of the database itself: through a pooler that shares out transactions nothing is heard. */
  readonly url: string;
  /** This replica's ID. */
  readonly replica: string;
  readonly log: Log;
  /** Tests shorten these two. */
  readonly checkEveryMs?: number;
  readonly answerMsMax?: number;
}

interface Publisher {
  readonly options: { readonly listenUrl: string | null };
  readonly store: Store;
  readonly log: Log;
}

/** Publishes every call that ends here from now on; null when that is not wanted. */
export function announceEnds({ options, store, log }: Publisher, replica: string, subscriber: Subscriber) {
  if (options.listenUrl === null) return null;
  const announcements = createAnnouncements({ url: options.listenUrl, replica, log, ...subscriber });
  store.onCallEnded(({ invocation_id }) => announcements.ended(invocation_id));
  return announcements;
}

/** By the primary only: a replica that listens to an old one that has become read-only hears nothing of the others. */
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
    // Only that it is there is meant for itself.
    if (what === undefined || (sender === replica) !== (what === "here")) return;
    if (what === "here") hasHeardItself();
    else if (what === "left") heard.left();
    else for (const id of what.split(",")) heard.ended(id);
  }

  const publish = (what: string) =>
    within(
      ANSWER_MS_MAX,
      client.unsafe(PUBLISH, [CHANNEL, `${replica} ${what}`]).then(() => {}),
    );

  const drop = (old: SQL) => old.close({ timeout: 0 }).catch(() => {});

  /** Listens where nobody does yet, and fails unless it then hears itself. */
  async function check(): Promise<void> {
    // Bun connects again by itself when the connection is lost.
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
      // What leads to the server may lead to another one by now.
      const old = client;
      client = postgresClient(url);
      void drop(old);
    }
  }

  async function flush(): Promise<void> {
    isWaiting = true;
    const ended = ids;
    ids = [];
    // The first one after a silence goes at once.
    await Promise.all([publish(ended.join()).catch(() => {}), Bun.sleep(50)]);
    isWaiting = false;
    if (ids.length > 0 && !isClosed) void flush();
  }

  void keepListening();
  const stopListening = every(checkEveryMs, keepListening);
  return {
    /** A call has ended here. */
    ended(id: string): void {
      // One announcement is bounded to 8,000 bytes by Postgres. Other replicas find further ends by looking.
      if (ids.length >= 180) return;
      ids.push(id);
      if (!isWaiting) void flush();
    },
    /** This replica's pending calls are now the others' to make. */
    left: (): Promise<void> => publish("left").catch(() => {}),
    async close(): Promise<void> {
      isClosed = true;
      stopListening();
      await drop(client);
    },
  };
}
