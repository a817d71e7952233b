//! Identify: the data structures that describe the controller and its namespaces.
//!
//! They are built from the configuration and the current state at each command, so a changed
//! namespace or MDTS needs no second copy to be kept up to date.
//!
//! NVMe Base 2.0c, 5.17 (Identify command).

use crate::command::data;
use crate::command::reply::CommandError;
use crate::device::ControllerState;
use crate::device::features::WARNING_KELVINS;
use crate::device::logs::ERROR_ENTRIES;
use crate::medium::namespace::{FORMATS, NamespaceImage};
use crate::memory::Dma;
use alloc::boxed::Box;
use alloc::string::String;
use nvme_auditor::ControllerCapabilities;
use nvme_spec::admin::cns;
use nvme_spec::identify::{
    IDENTIFY_BYTES, IdentifyController, IdentifyNamespace, LbaFormat, dlfeat, fna, lpa, nidt, oacs,
    oaes, oncs, sanicap, sgls, vwc,
};
use nvme_spec::{Nsid, Sqe, Status};
use nvme_units::SplitMix;
use zerocopy::{FromZeros, IntoBytes};

/// Firmware revision.
pub(crate) const FIRMWARE: &[u8; 8] = b"sim-0.1 ";
/// PCI vendor of controller and subsystem. The PCI-SIG has not assigned it, so no driver has quirks
/// for it.
pub(crate) const PCI_VENDOR: u16 = 0x4E56;
/// IEEE OUI of the identifiers: a locally administered one.
const OUI: [u8; 3] = [0x00, 0x00, 0x02];

type Page = Box<[u8]>;

fn page(bytes: &[u8]) -> Page {
    let mut page = alloc::vec![0; IDENTIFY_BYTES].into_boxed_slice();
    page[..bytes.len()].copy_from_slice(bytes);
    page
}

/// Returns `text`, cut to N bytes or padded with spaces.
fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut out = [b' '; N];
    for (to, from) in out
        .iter_mut()
        .zip(text.bytes().filter(|byte| matches!(byte, 0x20..=0x7E)))
    {
        *to = from;
    }
    out
}

/// Reports the controller's capabilities and namespaces to the auditor, at first and after each
/// change.
pub(crate) fn describe(device: &ControllerState) {
    if let Some(observer) = &device.observer {
        let mut capabilities =
            ControllerCapabilities::new(device.registers.cap, &identify_controller(device));
        for (nsid, one) in (1..).zip(device.namespaces.iter()) {
            capabilities.add_namespace(nsid, &namespace(device, nsid, one));
        }
        observer.describe(capabilities);
    }
}

/// Sends one of the Identify data structures. NVMe Base 2.0c, 5.17 (Identify command).
pub(crate) fn identify(
    device: &ControllerState,
    dma: &Dma<'_>,
    sqe: &Sqe,
) -> Result<(), CommandError> {
    let nsid = Nsid(sqe.nsid);
    let csi = (sqe.cdw11 >> 24) as u8;
    let controller_id = (sqe.cdw10 >> 16) as u16;
    let one = |nsid: Nsid| {
        let index = (nsid.0 as usize).wrapping_sub(1);
        device
            .namespaces
            .get(index)
            .ok_or(CommandError::from(Status::INVALID_NAMESPACE))
    };
    let page = match sqe.cdw10 as u8 {
        // The broadcast value asks for the common properties of all namespaces. A controller
        // without Namespace Management treats it as an invalid namespace.
        cns::NAMESPACE | cns::ALLOCATED_NAMESPACE => {
            page(namespace(device, nsid.0, one(nsid)?).as_bytes())
        }
        cns::CONTROLLER => page(identify_controller(device).as_bytes()),
        cns::ACTIVE_NAMESPACES | cns::ALLOCATED_NAMESPACES => {
            // Identifiers are listed above the given one, and above FFFFFFFEh there can be none.
            if nsid.0 >= 0xFFFF_FFFE {
                return Err(Status::INVALID_NAMESPACE.into());
            }
            let last = device.namespaces.len() as u32;
            let is_active = |id: &u32| one(Nsid(*id)).is_ok_and(|one| one.bytes() != 0);
            let ids = (nsid.0.saturating_add(1)..=last).filter(is_active);
            let mut list = [0u32; 1024];
            list.iter_mut().zip(ids).for_each(|(to, id)| *to = id);
            page(list.as_bytes())
        }
        cns::NAMESPACE_DESCRIPTORS => {
            one(nsid)?;
            page(&descriptors(&serial(device), nsid))
        }
        cns::CSI_NAMESPACE if csi == 0 => {
            one(nsid)?;
            page(&[]) // No format has protection information.
        }
        cns::CSI_CONTROLLER if csi == 0 => page(&[]), // No limits beyond MDTS.
        cns::INDEPENDENT_NAMESPACE => {
            one(nsid)?;
            let mut bytes = [0; 16];
            bytes[14] = 1; // NSTAT: ready.
            page(&bytes)
        }
        cns::NAMESPACE_CONTROLLERS => {
            one(nsid)?;
            controllers(controller_id)
        }
        cns::CONTROLLERS => controllers(controller_id),
        _ => return Err(Status::INVALID_FIELD.into()),
    };
    Ok(data::send(device.page(), dma, sqe, &page)?)
}

fn identify_controller(device: &ControllerState) -> IdentifyController {
    let config = &device.config;
    let mut c = IdentifyController::new_zeroed();
    c.vid = PCI_VENDOR;
    c.ssvid = PCI_VENDOR;
    let serial = serial(device);
    c.sn = padded(&serial);
    c.mn = padded(&config.model);
    c.fr = *FIRMWARE;
    c.rab = 3;
    c.ieee = OUI;
    c.mdts = device.external.mdts();
    c.cntlid = 1;
    c.ver = device.registers.version();
    c.rtd3r = 1_000_000;
    c.rtd3e = 1_000_000;
    c.oaes = oaes::NAMESPACE_ATTRIBUTE | oaes::FIRMWARE_ACTIVATION;
    c.cntrltype = 1;
    c.oacs = oacs::FORMAT;
    c.fna = fna::CRYPTO_ERASE;
    c.sanicap =
        sanicap::CRYPTO_ERASE | sanicap::BLOCK_ERASE | sanicap::OVERWRITE | sanicap::NOT_MODIFIED;
    c.acl = (config.abort_limit - 1) as u8;
    c.aerl = (config.aer_limit - 1) as u8;
    c.frmw = 1 << 1 | 1; // One slot, read-only.
    c.lpa = lpa::COMMANDS_SUPPORTED | lpa::EXTENDED_DATA | lpa::SUPPORTED_PAGES;
    c.elpe = (ERROR_ENTRIES - 1) as u8;
    c.apsta = 1;
    c.wctemp = WARNING_KELVINS;
    c.cctemp = WARNING_KELVINS + 10;
    c.hmpre = config.hmpre;
    c.hmmin = config.hmmin;
    let total: u128 = device
        .namespaces
        .iter()
        .map(|one| u128::from(one.store.bytes()))
        .sum();
    c.tnvmcap = total.to_le_bytes();
    c.kas = 10;
    c.sqes = 0x66;
    c.cqes = 0x44;
    c.nn = device.namespaces.len() as u32;
    c.oncs = oncs::COMPARE
        | oncs::WRITE_UNCORRECTABLE
        | oncs::DATASET_MANAGEMENT
        | oncs::WRITE_ZEROES
        | oncs::SAVE_SELECT
        | oncs::TIMESTAMP
        | oncs::VERIFY;
    c.vwc = vwc::BROADCAST_SUPPORTED;
    if config.write_cache {
        c.vwc |= vwc::PRESENT;
    }
    if config.sgl {
        c.sgls = sgls::ANY_ALIGNMENT | sgls::BIT_BUCKET;
    }
    let nqn = alloc::format!(
        "nqn.2014-08.org.nvmexpress:uuid:{}",
        dashed(&uuid(&serial, Nsid::NONE))
    );
    c.subnqn[..nqn.len()].copy_from_slice(nqn.as_bytes());
    c.psd[0].mp = 1000;
    c.psd[0].enlat = 1;
    c.psd[0].exlat = 1;
    c
}

fn formats(n: &mut IdentifyNamespace, metadata_bytes: u16) {
    n.nlbaf = (FORMATS.len() - 1) as u8;
    for (format, bytes) in n.lbaf.iter_mut().zip(FORMATS) {
        *format = LbaFormat {
            ms: metadata_bytes,
            lbads: bytes.trailing_zeros() as u8,
            rp: 0,
        };
    }
}

/// Returns the serial number, which a replaced drive changes.
fn serial(device: &ControllerState) -> String {
    device.external.serial(&device.config.serial)
}

fn namespace(device: &ControllerState, nsid: u32, namespace: &NamespaceImage) -> IdentifyNamespace {
    let mut n = IdentifyNamespace::new_zeroed();
    if namespace.bytes() == 0 {
        return n;
    }
    n.nguid = nguid(&serial(device), Nsid(nsid));
    n.dlfeat = dlfeat::READS_ZERO | dlfeat::WRITE_ZEROES_DEALLOCATE;
    let blocks = namespace.blocks();
    (n.nsze, n.ncap, n.nuse) = (blocks, blocks, blocks);
    formats(&mut n, namespace.metadata_bytes);
    n.flbas = namespace.format() as u8;
    n.mc = if namespace.metadata.is_some() {
        1 << 1
    } else {
        0
    };
    n.noiob = namespace.noiob;
    n.nvmcap = u128::from(namespace.store.bytes()).to_le_bytes();
    n.nsattr = namespace.is_read_only().into();
    n
}

/// Derives a 128-bit identifier from the serial number and the namespace.
fn nguid(serial: &str, nsid: Nsid) -> [u8; 16] {
    let seed = serial.bytes().fold(u64::from(nsid.0), |sum, byte| {
        SplitMix::new(sum ^ u64::from(byte)).next_word()
    });
    let mut out = [0; 16];
    out[..8].copy_from_slice(&SplitMix::new(seed).next_word().to_be_bytes());
    out[8..].copy_from_slice(&SplitMix::new(!seed).next_word().to_be_bytes());
    out
}

/// Derives a UUID from the serial number and the namespace, or for the subsystem (NSID 0).
fn uuid(serial: &str, nsid: Nsid) -> [u8; 16] {
    let mut uuid = nguid(serial, nsid);
    uuid[6] = uuid[6] & 0x0F | 0x40; // Version 4, variant 1.
    uuid[8] = uuid[8] & 0x3F | 0x80;
    uuid
}

/// Returns the text form of a UUID (RFC 4122, 3).
fn dashed(uuid: &[u8; 16]) -> String {
    let mut text = String::new();
    for (index, byte) in uuid.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&alloc::format!("{byte:02x}"));
    }
    text
}

fn descriptors(serial: &str, nsid: Nsid) -> [u8; 4 + 16 + 4 + 16 + 4 + 1] {
    let mut out = [0; 45];
    out[0] = nidt::NGUID;
    out[1] = 16;
    out[4..20].copy_from_slice(&nguid(serial, nsid));
    out[20] = nidt::UUID;
    out[21] = 16;
    out[24..40].copy_from_slice(&uuid(serial, nsid));
    out[40] = nidt::CSI;
    out[41] = 1; // One byte follows: 0, the NVM command set.
    out
}

/// Returns the controller list from `first` on: the only controller has identifier 1.
fn controllers(first: u16) -> Page {
    page(if first <= 1 { &[1, 0, 1, 0] } else { &[] })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_padded_and_cut() {
        assert_eq!(padded::<4>("ab"), *b"ab  ");
        assert_eq!(padded::<2>("a\u{e9}bc"), *b"ab");
    }

    #[test]
    fn namespaces_differ_and_repeat() {
        let (one, two) = (nguid("A", Nsid(1)), nguid("A", Nsid(2)));
        assert!(one != two && one == nguid("A", Nsid(1)) && one != nguid("B", Nsid(1)));
        let bytes = descriptors("A", Nsid(1));
        let kinds: alloc::vec::Vec<_> = nvme_spec::identify::descriptors(&bytes)
            .map(|descriptor| (descriptor.nidt, descriptor.nid.len()))
            .collect();
        assert_eq!(kinds, [(nidt::NGUID, 16), (nidt::UUID, 16), (nidt::CSI, 1)]);
    }

    use crate::testing::{DATA, Driver, config};
    use nvme_auditor::Rule;
    use nvme_spec::admin;
    use zerocopy::FromBytes;

    fn identify(driver: &mut Driver, cns: u8, nsid: u32) -> Result<alloc::vec::Vec<u8>, Status> {
        driver.admin(admin::identify(cns, Nsid(nsid)).with_prps(DATA + 0x800, DATA + 0x2000))?;
        let first = driver.bytes(DATA + 0x800, 0x800);
        Ok([first, driver.bytes(DATA + 0x2000, 0x800)].concat())
    }

    #[test]
    fn the_controller_says_what_it_was_configured_to_be() {
        let mut config = config();
        (config.mdts, config.hmpre, config.aer_limit) = (3, 77, 9);
        config.serial = "S1".into();
        let mut driver = Driver::new(config);
        let bytes = identify(&mut driver, cns::CONTROLLER, 0).unwrap();
        let c = IdentifyController::read_from_bytes(&bytes).unwrap();
        assert_eq!((c.mdts, c.hmpre, c.aerl, c.nn), (3, 77, 8, 1));
        assert_eq!(&c.sn, b"S1                  ");
        assert_eq!((c.sqes, c.cqes, c.ver), (0x66, 0x44, 0x0002_0000));
        let nqn = core::str::from_utf8(&c.subnqn)
            .unwrap()
            .trim_end_matches('\0');
        let uuid = nqn
            .strip_prefix("nqn.2014-08.org.nvmexpress:uuid:")
            .unwrap();
        let lengths: alloc::vec::Vec<usize> = uuid.split('-').map(str::len).collect();
        assert_eq!(lengths, [8, 4, 4, 4, 12], "{uuid}");
        assert!(
            uuid.bytes()
                .all(|byte| byte == b'-' || byte.is_ascii_hexdigit())
        );
    }

    #[test]
    fn a_namespace_says_its_size_and_formats() {
        let mut driver = Driver::new(config());
        let bytes = identify(&mut driver, cns::NAMESPACE, 1).unwrap();
        let n = IdentifyNamespace::read_from_bytes(&bytes).unwrap();
        assert_eq!((n.nsze, n.block_bytes(), n.nlbaf), (2048, Some(512), 1));
    }

    /// NVMe Base 2.0c, 5.17.2.2 (Identify Namespace data structure): without Namespace Management there
    /// is no structure of what all namespaces have in common.
    #[test]
    fn the_broadcast_namespace_has_no_structure_without_namespace_management() {
        let mut driver = Driver::new(config());
        let bytes = identify(&mut driver, cns::CONTROLLER, 0).unwrap();
        let c = IdentifyController::read_from_bytes(&bytes).unwrap();
        assert_eq!(c.oacs & oacs::NS_MANAGEMENT, 0);
        for cns in [cns::NAMESPACE, cns::ALLOCATED_NAMESPACE] {
            let refused = identify(&mut driver, cns, Nsid::ALL.0).map(|_| ());
            assert_eq!(refused, Err(Status::INVALID_NAMESPACE), "{cns:#x}");
        }
    }

    #[test]
    fn lists_start_above_the_given_identifier() {
        let mut config = config();
        for _ in 0..3 {
            let store = crate::medium::store::NullStore::new(4096);
            config
                .namespaces
                .push(crate::NamespaceConfig::new(512, Box::new(store)));
        }
        let mut driver = Driver::new(config);
        let list = identify(&mut driver, cns::ACTIVE_NAMESPACES, 2).unwrap();
        assert_eq!(list[..12], [3, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0]);
        let controllers = identify(&mut driver, cns::CONTROLLERS, 0).unwrap();
        assert_eq!(controllers[..4], [1, 0, 1, 0]);
        let attached = identify(&mut driver, cns::NAMESPACE_CONTROLLERS, 4).unwrap();
        assert_eq!(attached, controllers);
    }

    #[test]
    fn unknown_structures_and_namespaces_are_refused() {
        let mut driver = Driver::new(config());
        driver.breaks(&[Rule::NamespaceAbsent]);
        let mut code = |cns, nsid| identify(&mut driver, cns, nsid).map(|_| ());
        assert_eq!(code(0x55, 0), Err(Status::INVALID_FIELD));
        for cns in [
            cns::NAMESPACE,
            cns::NAMESPACE_DESCRIPTORS,
            cns::CSI_NAMESPACE,
        ] {
            assert_eq!(code(cns, 2), Err(Status::INVALID_NAMESPACE), "{cns}");
            assert_eq!(code(cns, 0), Err(Status::INVALID_NAMESPACE), "{cns}");
        }
        assert_eq!(
            code(cns::ACTIVE_NAMESPACES, 0xFFFF_FFFE),
            Err(Status::INVALID_NAMESPACE)
        );
        for cns in [
            cns::CSI_CONTROLLER,
            cns::CSI_NAMESPACE,
            cns::INDEPENDENT_NAMESPACE,
        ] {
            assert_eq!(code(cns, 1), Ok(()), "{cns}");
        }
    }
}
