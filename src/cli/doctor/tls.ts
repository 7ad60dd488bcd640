// The files of the facilitator's mutual-TLS port. That they are PEM and belong together, the configuration has judged.
import { parseCertificates } from "../../core/certificates.ts";
import { systemClock } from "../../core/clock.ts";
import { type Finding, findings, timeText, validityProblem } from "./findings.ts";

interface TlsTexts {
  readonly cert: string;
  readonly clientCa: string;
}

export async function tlsFindings({ cert, clientCa }: TlsTexts): Promise<Finding[]> {
  return [
    ...certificateFindings("server certificate", cert, "renew it in TOLLGATE_TLS_CERT_FILE, without a restart"),
    ...certificateFindings("client CA", clientCa, "put the next one beside it in TOLLGATE_CLIENT_CA_FILE in time"),
  ];
}

function certificateFindings(what: string, pem: string, advice: string): Finding[] {
  const validities = parseCertificates(pem).map(({ validFrom, validTo }) => ({
    from: Date.parse(validFrom),
    to: Date.parse(validTo),
  }));
  const problems = validities.map((validity) => validityProblem("a certificate", validity, systemClock.now(), advice));
  const end = Math.min(...validities.map(({ to }) => to));
  return findings(what, problems, `good until ${timeText(end)}`);
}
