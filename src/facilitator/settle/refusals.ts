// Payments that were refused before a claim: the exact reason, which no caller learns, for the log and for the
// operator's table. It is only a note: a failure to store it changes no answer.
import { sql } from "drizzle-orm";
import type { Clock } from "../../core/clock.ts";
import type { Log } from "../../core/log.ts";
import type { Store } from "../../storage/store.ts";
import type { Hex } from "../../x402/types.ts";
import { utcDay } from "../payments/daily-limits.ts";

/** An account chooses payers and nonces, so it could fill the table. Beyond this number only the log has the reasons. */
const NOTES_PER_DAY_MAX = 10_000;

export interface RefusalRecord {
  readonly account: string;
  readonly payer: Hex;
  readonly nonce: Hex;
  readonly reason: string;
}

export type RefusalLog = ReturnType<typeof createRefusalLog>;

interface RefusalLogOptions {
  readonly store: Store;
  readonly clock: Clock;
  readonly log: Log;
}

export function createRefusalLog({ store, clock, log }: RefusalLogOptions) {
  let today = "";
  const notes = new Map<string, number>();

  function isFull(account: string, now: number): boolean {
    const day = utcDay(now);
    if (day !== today) notes.clear();
    today = day;
    const count = (notes.get(account) ?? 0) + 1;
    notes.set(account, count);
    return count > NOTES_PER_DAY_MAX;
  }

  return {
    /** Never rejects. */
    async note(refusal: RefusalRecord): Promise<void> {
      log.info("payment_refused", { ...refusal });
      const now = clock.now();
      if (isFull(refusal.account, now)) return;
      try {
        await keep(store, refusal, now);
      } catch (error) {
        log.warn("refusal_not_stored", { account: refusal.account, error });
      }
    },
  };
}

function keep(store: Store, { account, payer, nonce, reason }: RefusalRecord, now: number): Promise<unknown> {
  return store.write(({ db, tables: { facilitatorRefusals: t } }) =>
    db
      .insert(t)
      .values({ account, payer, nonce, reason, attempts: 1, created_at: now, updated_at: now })
      .onConflictDoUpdate({
        target: [t.account, t.payer, t.nonce],
        set: { reason, attempts: sql`${t.attempts} + 1`, updated_at: now },
      }),
  );
}
