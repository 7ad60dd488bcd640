// The certificate, key and client CA of the mutual-TLS port, followed while it runs: whoever renews them only has to write
// the files. A change counts once two looks in a row have found the same content, so a half-written one does not. If it
// can't be used, the last one stays in force, and that is logged once.
import type { Log } from "../../core/log.ts";

const LOOK_MS = 1_000;

/** PEM. */
export interface TlsMaterial {
  /** The server's certificate and what leads from it to a root. */
  readonly cert: string;
  /** Without a passphrase. */
  readonly key: string;
  /** The one or more roots of client certificates. */
  readonly clientCa: string;
}

/** What the files hold now. */
export interface TlsReading {
  /** The same for the same content, and for no other. */
  readonly digest: string;
  judge():
    | { readonly tls: TlsMaterial; readonly warnings: readonly string[] }
    | { readonly tls: null; readonly problem: string };
}

interface Following {
  readonly read: () => Promise<TlsReading>;
  /** What is in force. */
  readonly tls: TlsMaterial;
  /** Puts it in force. When it throws, the last one stays. */
  readonly take: (tls: TlsMaterial) => void;
  readonly log: Log;
  /** Between two looks; tests shorten it. */
  readonly lookMs?: number;
}

/** Returns what ends it. */
export function followTlsFiles({ read, tls, take, log, lookMs = LOOK_MS }: Following): () => void {
  let inForce = tls;
  let seen = "";
  let judged = "";
  let looking = false;

  async function look(): Promise<void> {
    const reading = await read();
    const isSettled = reading.digest === seen;
    seen = reading.digest;
    if (!isSettled || reading.digest === judged) return;
    judged = reading.digest;
    const found = reading.judge();
    if (found.tls === null) log.error("tls_files_refused", { problem: found.problem });
    else if (!isSame(found.tls, inForce)) put(found.tls, found.warnings);
  }

  function put(next: TlsMaterial, warnings: readonly string[]): void {
    try {
      take(next);
    } catch (error) {
      log.error("tls_files_refused", { error });
      return;
    }
    inForce = next;
    log.info("tls_files_taken");
    for (const warning of warnings) log.warn("tls_files_suspect", { warning });
  }

  const timer = setInterval(() => {
    // While a file system hangs, it is not asked again.
    if (looking) return;
    looking = true;
    void look()
      .catch((error) => log.error("tls_files_not_read", { error }))
      .finally(() => {
        looking = false;
      });
  }, lookMs);
  return () => clearInterval(timer);
}

function isSame(a: TlsMaterial, b: TlsMaterial): boolean {
  return a.cert === b.cert && a.key === b.key && a.clientCa === b.clientCa;
}
