// What one replica tells the others at once, over LISTEN and NOTIFY of Postgres: which calls have ended, and that it has
// left. It is a help and no more: whatever is lost on the way is found by looking, a second or two later. NOTIFY takes a
// lock of the whole server at its commit, so it is never a part of a write, and what is to be told is gathered.
import type { SQL } from "bun";
import type { Log } from "../core/log.ts";
import { postgresClient } from "./pool.ts";
import type { Store } from "./store.ts";

const CHANNEL = "tollgate";
/** At most so often; the first one after a silence goes at once. */
const EVERY_MS = 50;
/** In one announcement, which Postgres bounds to 8,000 bytes. Of more than that the others learn by looking. */
const IDS_MAX = 180;
const TRY_AGAIN_MS = 5_000;
/**
 * The sender, and the calls that have ended or none when it has left. Whoever may connect to the database may say anything
 * here, so there is one way to read each text: with two for each ID a payload of 8,000 bytes took 1.3 s (measured).
 */
const FORM = /^(rep_[\w-]+) (left|inv_[\w-]+(?:,inv_[\w-]+)*)$/;

/** What is done with what is told. */
export interface Hearing {
  /** A call has ended on another replica. */
  ended(id: string): void;
  /** Another replica has left its pending calls to the others. */
  left(): void;
}

interface AnnouncementsOptions extends Hearing {
  /** Of the database itself: through a pooler that shares out transactions nothing is heard. */
  readonly url: string;
  /** This replica's ID. */
  readonly replica: string;
  readonly log: Log;
}

interface Teller {
  readonly options: { readonly listenUrl: string | null };
  readonly store: Store;
  readonly log: Log;
}

/** Tells of every call that ends here from now on; null when that is not wanted. */
export function announceEnds({ options, store, log }: Teller, replica: string, hearing: Hearing) {
  if (options.listenUrl === null) return null;
  const announcements = createAnnouncements({ url: options.listenUrl, replica, log, ...hearing });
  store.onCallEnded(({ invocation_id }) => announcements.ended(invocation_id));
  return announcements;
}

export function createAnnouncements({ url, replica, log, ...heard }: AnnouncementsOptions) {
  const client: SQL = postgresClient(url);
  let ids: string[] = [];
  let isWaiting = false;
  let isClosed = false;
  let isKnownDeaf = false;
  let tryAgain: ReturnType<typeof setTimeout> | undefined;

  function hear(payload: string): void {
    const [, sender, what] = FORM.exec(payload) ?? [];
    if (sender === undefined || what === undefined || sender === replica) return;
    if (what === "left") heard.left();
    else for (const id of what.split(",")) heard.ended(id);
  }

  async function listen(): Promise<void> {
    try {
      // Bun connects again by itself when the connection is lost.
      await client.listen(CHANNEL, hear);
      isKnownDeaf = false;
    } catch (error) {
      if (isClosed) return;
      if (!isKnownDeaf) log.warn("announcements_not_heard", { error });
      isKnownDeaf = true;
      tryAgain = setTimeout(listen, TRY_AGAIN_MS);
      tryAgain.unref();
    }
  }

  const tell = (what: string) => client.notify(CHANNEL, `${replica} ${what}`).catch(() => {});

  async function flush(): Promise<void> {
    isWaiting = true;
    const told = ids;
    ids = [];
    await Promise.all([tell(told.join()), Bun.sleep(EVERY_MS)]);
    isWaiting = false;
    if (ids.length > 0 && !isClosed) void flush();
  }

  void listen();
  return {
    /** A call has ended here. */
    ended(id: string): void {
      if (ids.length >= IDS_MAX) return;
      ids.push(id);
      if (!isWaiting) void flush();
    },
    /** This replica's pending calls are now the others' to make. */
    left: (): Promise<void> => tell("left"),
    async close(): Promise<void> {
      isClosed = true;
      clearTimeout(tryAgain);
      await client.close({ timeout: 0 }).catch(() => {});
    },
  };
}
