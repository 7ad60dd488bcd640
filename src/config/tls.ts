// The files of the mutual-TLS port, as they are read again and again while it runs.
import { readFile, stat } from "node:fs/promises";
import { systemClock } from "../core/clock.ts";
import {
  caFile,
  certificateFile,
  FILE_BYTES_MAX,
  type FileKind,
  isKeyOf,
  privateKeyFile,
  validityWarnings,
} from "./pem.ts";
import { valueProblem } from "./values.ts";

type Part = "cert" | "key" | "clientCa";

/** Paths, or the texts of the files. */
type TlsParts = Readonly<Record<Part, string>>;

const KINDS: Readonly<Record<Part, { readonly name: string; readonly kind: FileKind }>> = {
  cert: { name: "TOLLGATE_TLS_CERT_FILE", kind: certificateFile },
  key: { name: "TOLLGATE_TLS_KEY_FILE", kind: privateKeyFile },
  clientCa: { name: "TOLLGATE_CLIENT_CA_FILE", kind: caFile },
};

/** What the files hold now. Their content is compared, not times or names, so a swapped link is a change as well. */
export async function readTlsFiles(paths: TlsParts) {
  const [cert, key, clientCa] = await Promise.all([paths.cert, paths.key, paths.clientCa].map(readText));
  const texts = { cert: cert ?? "", key: key ?? "", clientCa: clientCa ?? "" };
  return { digest: digestOf(texts), judge: () => judge(texts, paths) };
}

/** Empty for a file that can't be read: it holds no PEM either. */
async function readText(path: string): Promise<string> {
  try {
    return (await stat(path)).size > FILE_BYTES_MAX ? "" : await readFile(path, "utf8");
  } catch {
    return "";
  }
}

/** Kept in place of the texts, since one of them is a private key. */
function digestOf({ cert, key, clientCa }: TlsParts): string {
  return new Bun.CryptoHasher("sha256").update(JSON.stringify([cert, key, clientCa])).digest("hex");
}

type JudgedTls =
  | { readonly tls: TlsParts; readonly warnings: readonly string[] }
  | { readonly tls: null; readonly problem: string };

function judge(texts: TlsParts, paths: TlsParts): JudgedTls {
  const read = (part: Part) => KINDS[part].kind.read(texts[part]);
  const unusable = (part: Part): JudgedTls => {
    const { name, kind } = KINDS[part];
    return { tls: null, problem: valueProblem(name, kind, paths[part]) };
  };
  const [cert, key, clientCa] = [read("cert"), read("key"), read("clientCa")];
  if (cert === undefined) return unusable("cert");
  if (key === undefined) return unusable("key");
  if (clientCa === undefined) return unusable("clientCa");
  if (!isKeyOf(key, cert)) {
    const [own, other] = [KINDS.key.name, KINDS.cert.name];
    return { tls: null, problem: `${own} must hold the key of the first certificate in ${other}` };
  }
  const warn = (part: Part, text: string) => validityWarnings(KINDS[part].name, text, systemClock.now());
  return { tls: { cert, key, clientCa }, warnings: [...warn("cert", cert), ...warn("clientCa", clientCa)] };
}
